"""Merging: what two looks at a tensor saw is what one look at both would have seen."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from torch import Tensor

from pytest_modelhealth.statistics import TensorStatistics, reduce
from tests.statistics import oracle
from tests.statistics.tensors import tensors

doubles = tensors(torch.float64)


def assert_same_but_for_rounding(a: TensorStatistics, b: TensorStatistics) -> None:
    """Assert equal counts, extremes and bins, and moments equal to float64 rounding."""
    assert oracle.counts(a) == oracle.counts(b)
    oracle.assert_moments(a, b.mean, b.std)


@given(a=tensors(), b=tensors())
def test_merging_is_reducing_both_at_once(a: Tensor, b: Tensor) -> None:
    """Counts, extremes and histogram are exact, moments right to rounding, for any two dtypes."""
    values = oracle.real_values(a) + oracle.real_values(b)
    oracle.assert_describes(reduce(a).merge(reduce(b)), values)


@given(a=doubles, b=doubles, c=doubles)
def test_neither_order_nor_grouping_of_batches_matters(a: Tensor, b: Tensor, c: Tensor) -> None:
    """Merging commutes and is associative, but for rounding."""
    first, second, third = reduce(a), reduce(b), reduce(c)
    left = first.merge(second).merge(third)
    assert_same_but_for_rounding(left, first.merge(second.merge(third)))
    assert_same_but_for_rounding(left, third.merge(second.merge(first)))


@given(a=doubles)
def test_an_empty_tensor_adds_nothing(a: Tensor) -> None:
    """Merging with the statistics of no values keeps every number to the last bit."""
    statistics, nothing = reduce(a), reduce(torch.empty(0))
    merged, turned = statistics.merge(nothing), nothing.merge(statistics)
    assert oracle.bits(merged) == oracle.bits(statistics)
    assert oracle.bits(turned)[:2] == oracle.bits(statistics)[:2]


def test_many_small_batches_keep_the_moments_of_all() -> None:
    """A thousand merges cost no more than a few roundings."""
    values = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0)) + 1000
    merged = reduce(values[0])
    for row in values[1:]:
        merged = merged.merge(reduce(row))
    exact = values.double().numpy()
    assert merged.mean == pytest.approx(exact.mean(), rel=1e-13)
    assert merged.std == pytest.approx(exact.std(), rel=1e-11)


def test_a_constant_stays_a_constant() -> None:
    """Equal values have a standard deviation of exactly zero, however many batches there are."""
    merged = reduce(torch.empty(0))
    for length in (3, 1, 10, 70_001):  # sums of this many tenths are not exact
        merged = merged.merge(reduce(torch.full((length,), 0.1, dtype=torch.float64)))
        assert (merged.mean, merged.std) == (0.1, 0.0)


LARGEST = 1.7976931348623157e308


def test_moments_of_the_largest_numbers_do_not_overflow() -> None:
    """Sums and squares may leave float64 on the way, mean and deviation do not."""
    values = torch.tensor([-LARGEST, LARGEST] * 8, dtype=torch.float64)
    both = reduce(values[::2]).merge(reduce(values[1::2]))
    for statistics in (reduce(values), both):
        assert statistics.mean == 0.0
        assert statistics.std == pytest.approx(LARGEST, rel=1e-15)
    assert reduce(values[1:2]).merge(reduce(values[1:2])).norm == math.inf


def test_moments_of_the_smallest_numbers_do_not_vanish() -> None:
    """Values whose squares are no float64 still deviate and have a norm."""
    values = torch.tensor([3e-200, 1e-200], dtype=torch.float64)
    for statistics in (reduce(values), reduce(values[:1]).merge(reduce(values[1:]))):
        assert statistics.std == pytest.approx(1e-200)
        assert statistics.norm == pytest.approx(math.hypot(3e-200, 1e-200))


def test_moments_of_nothing_are_no_numbers() -> None:
    """No values have neither mean nor deviation, and merging two such keeps it so."""
    nothing = reduce(torch.empty(0)).merge(reduce(torch.empty(0)))
    assert nothing.count == 0
    assert math.isnan(nothing.mean)
    assert math.isnan(nothing.std)


def test_shape_dtype_and_device_are_those_of_the_first() -> None:
    """A merged summary names the tensor that came first."""
    merged = reduce(torch.ones(2, 3)).merge(reduce(torch.ones(5).half()))
    assert (merged.shape, merged.dtype, merged.device) == ((2, 3), "float32", "cpu")
