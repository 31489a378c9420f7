"""`measure` agrees with NumPy in float64, and counts what has no number."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from pytest_modelhealth.comparison.measures import Difference, equal_nans, gap, measure

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_measure_is_that_of_numpy(dtype):
    """Norms, errors, cosine and place are those of a float64 computation, in several chunks too."""
    torch.manual_seed(0)
    reference = torch.randn(1031, 1031).to(dtype)
    candidate = (reference * (1 + 0.01 * torch.randn(1031, 1031))).to(dtype)
    a, b = reference.double().numpy(), candidate.double().numpy()
    found = measure(reference, candidate)
    error = np.abs(a - b)
    assert found.count == 1031 * 1031 > 1 << 20
    assert found.unequal == (a != b).sum()
    assert found.max_abs == error.max()
    assert found.at == np.unravel_index(error.argmax(), a.shape)
    assert (found.expected, found.found) == (a[found.at], b[found.at])
    assert found.max_rel == pytest.approx((error / np.abs(a)).max())
    assert found.error_norm == pytest.approx(np.linalg.norm(a - b))
    assert found.relative_l2 == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a))
    assert found.cosine == pytest.approx((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))
    power = (a**2).sum() / ((a - b) ** 2).sum()
    assert found.sqnr == pytest.approx(10 * math.log10(power))
    assert gap(reference, candidate) == pytest.approx((found.error_norm, found.max_abs), rel=1e-4)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("start", [1.0, -3.5, 0.0, 1e-300])
def test_ulp_counts_representable_values(dtype, steps, start):
    """The distance in ULP is the number of steps of `nextafter`, through zero too."""
    value = dtype(start)
    other = value
    for _ in range(steps):
        other = np.nextafter(other, dtype(-1))
    found = measure(torch.tensor([value]), torch.tensor([other]))
    assert found.max_ulp == steps


def test_ulp_from_one_end_to_the_other_does_not_overflow():
    """The largest and the smallest number are nearly all numbers apart."""
    largest = torch.tensor([torch.finfo(torch.float64).max], dtype=torch.float64)
    assert measure(largest, -largest).max_ulp == pytest.approx(2.0**64, rel=1e-3)


def test_ulp_is_counted_in_the_coarser_dtype():
    """A float32 number and its rounding to bfloat16 are no step apart."""
    value = torch.tensor([1.2345])
    assert measure(value, value.bfloat16()).max_ulp == 0


def test_numbers_that_are_none_are_counted_by_side():
    """NaN on both sides is equal; NaN or another infinity on one side only is not a number off."""
    reference = torch.tensor([NAN, NAN, 1.0, INF, INF, 2.0, -INF])
    candidate = torch.tensor([NAN, 1.0, NAN, INF, -INF, 2.5, 0.0])
    found = measure(reference, candidate)
    assert (found.nan_both, found.nan_reference, found.nan_candidate) == (1, 1, 1)
    assert found.other_infinities == 2
    assert found.nonfinite == 4
    assert found.unequal == 5
    assert found.max_abs == 0.5
    assert found.at == (1,)


def test_tensors_without_a_difference_measure_nothing():
    """Equal tensors, empty ones and scalars have no error and an infinite SQNR."""
    for tensor in (torch.randn(3), torch.empty(0, 4), torch.tensor(2.0)):
        found = measure(tensor, tensor.clone())
        assert (found.unequal, found.relative_l2, found.sqnr) == (0, 0.0, math.inf)
    assert Difference(count=1, error_squares=1.0).relative_l2 == math.inf


@pytest.mark.parametrize(
    ("a", "b", "nans"),
    [
        ([1.0, NAN], [1.0, NAN], 1),
        ([0.0], [-0.0], 0),
        ([1.0, NAN], [NAN, 1.0], None),
        ([1.0, NAN], [2.0, NAN], None),
        ([1.0], [1.0000001], None),
        ([INF], [-INF], None),
    ],
)
def test_equal_means_every_element_and_nan_to_nan(a, b, nans):
    """The cheap test holds NaN equal to NaN, and zero to negative zero."""
    assert equal_nans(torch.tensor(a), torch.tensor(b)) == nans


def test_another_dtype_is_not_equal():
    """Equal numbers in another dtype are measured, not waved through."""
    assert equal_nans(torch.ones(2), torch.ones(2, dtype=torch.float64)) is None
