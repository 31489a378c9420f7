"""`measure` agrees with NumPy in float64, and counts what has no number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pytest_modelhealth.comparison.measures import gap, measure

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_measure_is_that_of_numpy(dtype):
    """Norms, errors and place are those of a float64 computation, in several chunks too."""
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
    assert found.error_norm == pytest.approx(np.linalg.norm(a - b))
    assert found.relative_l2 == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a))
    assert gap(reference, candidate) == pytest.approx((found.error_norm, found.max_abs), rel=1e-4)


@pytest.mark.parametrize(
    ("a", "b", "unequal", "nans", "nonfinite"),
    [
        ([1.0, NAN], [1.0, NAN], 0, 1, 0),
        ([0.0], [-0.0], 0, 0, 0),
        ([1.0, NAN], [NAN, 1.0], 2, 0, 2),
        ([1.0, NAN], [2.0, NAN], 1, 1, 0),
        ([1.0], [1.0000001], 1, 0, 0),
        ([INF], [-INF], 1, 0, 1),
        ([NAN, INF, 2.0, -INF], [NAN, INF, 2.5, 0.0], 2, 1, 1),
    ],
)
def test_equal_means_every_element_and_nan_to_nan(a, b, unequal, nans, nonfinite):
    """NaN is equal to NaN, and zero to negative zero; what is none on one side is counted."""
    found = measure(torch.tensor(a), torch.tensor(b))
    assert (found.unequal, found.nan_both, found.nonfinite) == (unequal, nans, nonfinite)
