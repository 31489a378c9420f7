"""`TensorStatistics`: the numbers derived from what is kept, and how it shows itself."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

from pytest_modelhealth.statistics import reduce
from tests.statistics import oracle
from tests.statistics.tensors import tensors


@given(tensor=tensors())
def test_every_value_lies_inside_its_bin(tensor: Tensor) -> None:
    """Sorting the values into the edges by comparison alone gives the counts again.

    Edges are finite, strictly ascending, symmetric, and powers of two but for the ends.
    """
    counts, edges = reduce(tensor).histogram
    assert len(edges) == len(counts) + 1
    assert (counts.dtype, edges.dtype) == (np.int64, np.float64)
    assert (np.diff(edges) > 0).all()
    assert (edges == -edges[::-1]).all()
    assert np.isfinite(edges).all()
    assert all(math.frexp(edge)[0] == 0.5 for edge in edges[len(edges) // 2 : -1])
    found = np.zeros(len(counts), dtype=np.int64)
    for value in oracle.real_values(tensor):
        if math.isfinite(value):
            found[bin_of(value, edges.tolist())] += 1
    assert found.tolist() == counts.tolist()


def bin_of(value: float, edges: list[float]) -> int:
    """Return the only bin that holds `value`, by the rule in the docstring of `Histogram`."""
    middle = len(edges) // 2 - 1
    pairs = list(enumerate(pairwise(edges)))
    if value == 0:
        return middle
    if value < 0:
        holding = [i for i, (low, high) in pairs[:middle] if low < value <= high]
    else:
        holding = [i for i, (low, high) in pairs[middle + 1 :] if low <= value < high]
    if not holding and abs(value) == edges[-1] == math.ldexp(1 - 2.0**-53, 1024):
        return len(edges) - 2 if value > 0 else 0  # the outermost bins hold the largest number
    (only,) = holding
    return only


def test_a_histogram_is_read_from_left_to_right() -> None:
    """Negative bins, the zeros, then positive bins, each twice as wide as the one before."""
    counts, edges = reduce(torch.tensor([-1.0, -0.75, 0.0, -0.0, 0.5, 1.0, 1.5])).histogram
    assert edges.tolist() == [-2.0, -1.0, -0.5, 0.5, 1.0, 2.0]
    assert counts.tolist() == [1, 1, 2, 1, 2]


def test_underflow_and_overflow_have_bins_of_their_own() -> None:
    """All that is too small for a normal float32 shares a bin, as does all too large for it."""
    values = [5e-324, 1e-40, 2.0**-126, 3e38, 2.0**128, 1e300]
    counts, edges = reduce(torch.tensor(values, dtype=torch.float64)).histogram
    positive = len(counts) // 2 + 1
    assert counts[[positive, positive + 1, -2, -1]].tolist() == [2, 1, 1, 2]
    assert edges[[positive, positive + 1]].tolist() == [2.0**-1074, 2.0**-126]
    assert edges[[-2, -1]].tolist() == [2.0**128, np.finfo(np.float64).max]


@pytest.mark.parametrize("values", [[], [math.nan, math.inf]])
def test_without_finite_values_the_histogram_is_empty(values: list[float]) -> None:
    """There is a bin for the zeros and nothing in it."""
    counts, edges = reduce(torch.tensor(values)).histogram
    assert counts.tolist() == [0]
    assert edges.tolist() == [-1.0, 1.0]


def test_derived_numbers_follow_numpy() -> None:
    """Norm, RMS, largest magnitude and fractions are those of the finite values."""
    values = np.array([3.0, -4.0, 0.0, -0.0, np.nan, np.inf, -np.inf, -np.inf])
    statistics = reduce(torch.from_numpy(values))
    finite = values[np.isfinite(values)]
    assert statistics.norm == pytest.approx(np.linalg.norm(finite))
    assert statistics.rms == pytest.approx(np.sqrt(np.mean(finite**2)))
    assert statistics.abs_max == 4.0
    assert statistics.zero_fraction == 2 / 8
    assert (statistics.nan_count, statistics.inf_count, statistics.finite_count) == (1, 3, 4)
    assert (statistics.positive_inf_count, statistics.negative_inf_count) == (1, 2)
    assert statistics.nonfinite_count == 4


def test_without_finite_values_there_are_no_moments() -> None:
    """Moments and extremes are NaN rather than an invented zero; the norm of nothing is 0."""
    statistics = reduce(torch.tensor([math.nan, math.inf]))
    moments = (statistics.mean, statistics.std, statistics.rms)
    extremes = (statistics.min, statistics.max, statistics.abs_max)
    assert all(map(math.isnan, moments + extremes))
    assert statistics.norm == 0.0
    assert statistics.zero_fraction == 0.0
    assert math.isnan(reduce(torch.empty(0)).zero_fraction)


def test_one_line_shows_what_matters() -> None:
    """The repr is a line; what is not there is not mentioned."""
    values = torch.tensor([[0.0, 1.0], [0.0, 3.0]])
    assert repr(reduce(values)) == (
        "TensorStatistics(shape=(2, 2), dtype=float32, mean=1, std=1.225, "
        "min=0, max=3, zeros=50.0%)"
    )
    ill = reduce(torch.tensor([[0.0, math.nan, 1.0], [0.0, math.inf, 1.0]]), 1)
    assert repr(ill).endswith("zeros=33.3%, nan=1, inf=1, dead=33.3%)")
