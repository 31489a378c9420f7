"""What statistics must be, by another way: one value after the other, moments with 60 digits."""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal, localcontext

import numpy as np
import torch
from torch import Tensor

from pytest_modelhealth.statistics import (
    DEAD_RATIO,
    HIGHEST_EXPONENT,
    LOWEST_EXPONENT,
    TensorStatistics,
)


def real_values(tensor: Tensor) -> list[float]:
    """Return the values of a strided real tensor as Python floats."""
    if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point:
        tensor = tensor.to(torch.float32)
    return [float(value) for value in tensor.reshape(-1).tolist()]


def moments(finite: Sequence[float]) -> tuple[float, float]:
    """Return mean and population standard deviation."""
    if not finite:
        return math.nan, math.nan
    with localcontext(prec=60):
        exact = [Decimal(value) for value in finite]
        mean = sum(exact) / len(exact)
        variance = sum((value - mean) ** 2 for value in exact) / len(exact)
        return float(mean), float(variance.sqrt())


def bins(finite: Sequence[float]) -> Counter[tuple[bool, int]]:
    """Count the non-zero values by (is negative, clipped exponent)."""
    exponents = ((value < 0, math.frexp(value)[1] - 1) for value in finite if value)
    return Counter(
        (negative, min(max(exponent, LOWEST_EXPONENT), HIGHEST_EXPONENT))
        for negative, exponent in exponents
    )


def kept_bins(statistics: TensorStatistics) -> Counter[tuple[bool, int]]:
    """Return what `statistics` counted, in the form of `bins`."""
    kept = statistics.exponents
    return Counter(
        {
            (sign == 0, kept.lowest + row): int(count)
            for (row, sign), count in np.ndenumerate(kept.counts)
            if count
        }
    )


def assert_describes(statistics: TensorStatistics, values: Sequence[float]) -> None:
    """Assert that `statistics` are those of `values`."""
    finite = [value for value in values if math.isfinite(value)]
    assert statistics.count == len(values)
    assert statistics.nan_count == sum(map(math.isnan, values))
    assert statistics.positive_inf_count == values.count(math.inf)
    assert statistics.negative_inf_count == values.count(-math.inf)
    assert statistics.finite_count == len(finite)
    assert statistics.zero_count == finite.count(0.0)
    assert same(statistics.min, min(finite, default=math.nan))
    assert same(statistics.max, max(finite, default=math.nan))
    assert kept_bins(statistics) == bins(finite)
    assert statistics.histogram.counts.sum() == len(finite)
    assert_moments(statistics, *moments(finite))


def assert_moments(statistics: TensorStatistics, mean: float, std: float) -> None:
    """Assert moments to float64 rounding, which is relative to the largest magnitude."""
    assert close(statistics.mean, mean, scale=statistics.abs_max), (statistics.mean, mean)
    assert close(statistics.std, std, scale=statistics.abs_max), (statistics.std, std)


def close(a: float, b: float, scale: float) -> bool:
    """Whether two numbers are equal up to a few dozen roundings of numbers as large as `scale`."""
    if math.isnan(a) or math.isnan(b):
        return same(a, b)
    return math.isclose(a, b, rel_tol=1e-13, abs_tol=max(1e-14 * scale, 2.0**-1068))


def same(a: float, b: float) -> bool:
    """Whether two numbers are equal, two NaNs included."""
    return a == b or (math.isnan(a) and math.isnan(b))


def counts(statistics: TensorStatistics) -> tuple[object, ...]:
    """Return all that a merge must keep exactly."""
    return (
        statistics.count,
        statistics.nan_count,
        statistics.positive_inf_count,
        statistics.negative_inf_count,
        statistics.zero_count,
        None if math.isnan(statistics.min) else (statistics.min, statistics.max),
        kept_bins(statistics),
    )


def bits(statistics: TensorStatistics) -> tuple[object, ...]:
    """Return everything in `statistics`, comparable to the last bit."""
    units = statistics.units
    arrays = () if units is None else (units.alive, units.minimum, units.maximum)
    return (
        counts(statistics),
        struct.pack("2d", statistics.mean, statistics.std),
        tuple(array.tobytes() for array in arrays),
        None if units is None else units.observations,
        (statistics.shape, statistics.dtype, statistics.device),
    )


def assert_agrees(
    statistics: TensorStatistics, tensor: Tensor, dim: int | None = None, *, sampled: bool = False
) -> None:
    """Assert that `statistics` are those that NumPy finds in a tensor of any size, by float64."""
    values = tensor.detach().to(torch.float64).numpy()
    finite = values[np.isfinite(values)].astype(np.longdouble)
    assert statistics.count == values.size
    assert statistics.nan_count == np.isnan(values).sum()
    assert statistics.positive_inf_count == np.isposinf(values).sum()
    assert statistics.negative_inf_count == np.isneginf(values).sum()
    assert statistics.zero_count == (finite == 0).sum()
    assert statistics.histogram_sampled is sampled
    if finite.size:
        assert (statistics.min, statistics.max) == (finite.min(), finite.max())
        assert close(statistics.mean, float(finite.mean()), scale=statistics.abs_max)
        assert math.isclose(statistics.std, float(finite.std()), rel_tol=1e-12)
    if not sampled:
        exponents = np.frexp(finite[finite != 0].astype(np.float64))[1] - 1
        rows = np.clip(exponents, LOWEST_EXPONENT, HIGHEST_EXPONENT)
        found = np.unique(np.stack([finite[finite != 0] < 0, rows]), axis=1, return_counts=True)
        expected = {(bool(s), int(e)): int(n) for s, e, n in zip(*found[0], found[1], strict=True)}
        assert kept_bins(statistics) == expected
    if dim is not None:
        by_unit = np.moveaxis(values, dim, 0).reshape(values.shape[dim], -1)
        assert statistics.units is not None
        low, high = by_unit.min(axis=1), by_unit.max(axis=1)
        assert np.array_equal(statistics.units.minimum, low, equal_nan=True)
        assert np.array_equal(statistics.units.maximum, high, equal_nan=True)
        silent = np.maximum(abs(low), abs(high)) <= DEAD_RATIO * statistics.abs_max
        assert np.array_equal(statistics.units.alive, ~silent)
