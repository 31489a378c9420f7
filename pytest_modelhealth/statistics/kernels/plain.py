"""The plain torch kernel: correct everywhere, the oracle that faster ones are held against.

Every chunk is widened to float64, where a float32 has headroom for its square and a sum of a
million values of mean 1000 keeps its variance; chunks are small enough to stay in cache.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pytest_modelhealth.statistics.exponents import (
    HIGHEST_EXPONENT,
    LOWEST_EXPONENT,
    ExponentCounts,
)
from pytest_modelhealth.statistics.kernels.kernel import Extremes, KernelResult
from pytest_modelhealth.statistics.moments import Moments

CHUNK_ELEMENTS = 1 << 16
"""Elements widened at a time on a CPU: 512 kB of float64, which stay in its second-level cache."""

ACCELERATOR_CHUNK_ELEMENTS = 1 << 22
"""The same elsewhere, where every chunk costs a few round trips to the device."""

_MANTISSA_BITS, _EXPONENT_BIAS, _EXPONENTS = 52, 1023, 2048


def summarize(values: Tensor) -> KernelResult:
    """Return the counts, moments, extremes and exponents of real, strided `values`."""
    result = KernelResult()
    rows = np.zeros(2 * _EXPONENTS, dtype=np.int64)
    size = CHUNK_ELEMENTS if values.device.type == "cpu" else ACCELERATOR_CHUNK_ELEMENTS
    for chunk in chunks(values, size):
        _add_chunk(result, rows, chunk)
    result.exponents = _exponent_counts(rows)
    return result


def unit_extremes(values: Tensor, dim: int) -> Extremes:
    """Return the least and the greatest value at each index of `dim`; NaN where there is one.

    Args:
        values: real and strided, with at least one element.
        dim: from 0 to ``values.ndim - 1``.
    """
    others = [d for d in range(values.ndim + 1) if d != dim]
    values = values.unsqueeze(-1)  # of a vector too, something is left to reduce
    minimum, maximum = values.amin(others), values.amax(others)
    return minimum.cpu().to(torch.float64).numpy(), maximum.cpu().to(torch.float64).numpy()


def chunks(values: Tensor, size: int) -> Iterator[Tensor]:
    """Yield all elements, in any order, in flat pieces; at most one piece is a copy at a time."""
    by_stride = sorted(range(values.ndim), key=values.stride, reverse=True)
    if values.numel():
        yield from _split(values.permute(by_stride), size)


def _split(values: Tensor, size: int) -> Iterator[Tensor]:
    if values.is_contiguous():
        yield from values.view(-1).split(size)
    elif values.numel() <= size:
        yield values.reshape(-1)
    else:
        rows = size * len(values) // values.numel()
        blocks = values.split(rows) if rows else values
        for block in blocks:
            yield from _split(block, size)


def _add_chunk(result: KernelResult, rows: npt.NDArray[np.int64], chunk: Tensor) -> None:
    wide = _widen(chunk)
    low, high = _extremes(wide)
    if not (math.isfinite(low) and math.isfinite(high)):  # a NaN makes both NaN
        wide = _count_nonfinite(result, wide)
        if not wide.numel():
            return
        low, high = _extremes(wide)
    result.min = float(np.fmin(result.min, low))
    result.max = float(np.fmax(result.max, high))
    result.moments = result.moments.merge(_moments(wide, low, high))
    counts = _count_rows(wide)
    zeros = _take_zeros(counts, wide, may_be_subnormal=chunk.dtype is torch.float64)
    result.zero_count += zeros
    rows += counts


def _widen(chunk: Tensor) -> Tensor:
    if chunk.device.type == "mps":  # has no float64
        chunk = chunk.cpu()
    return chunk.to(torch.float64)


def _extremes(wide: Tensor) -> tuple[float, float]:
    low, high = torch.aminmax(wide)
    return float(low), float(high)


def _count_nonfinite(result: KernelResult, wide: Tensor) -> Tensor:
    """Count what is not finite and return the rest."""
    result.nan_count += int(wide.isnan().sum())
    result.positive_inf_count += int(wide.isposinf().sum())
    result.negative_inf_count += int(wide.isneginf().sum())
    return wide[wide.isfinite()]


def _moments(wide: Tensor, low: float, high: float) -> Moments:
    count = wide.numel()
    if low == high:  # a constant deviates by exactly nothing
        return Moments(count, low, 0.0)
    scale = _scale(max(-low, high))
    scaled = wide if scale == 1.0 else wide * scale
    mean = float(scaled.mean())
    deviations = scaled - mean
    variance = float(torch.dot(deviations, deviations)) / count
    return Moments(count, mean / scale, math.sqrt(variance) / scale)


def _scale(abs_max: float) -> float:
    """Return the power of two that keeps sums and squares inside float64; mostly 1."""
    exponent = math.frexp(abs_max)[1]
    if -450 <= exponent <= 500:
        return 1.0
    return math.ldexp(1.0, -min(max(exponent, -1000), 1000))


def _count_rows(wide: Tensor) -> npt.NDArray[np.int64]:
    """Count values by their topmost bits: the sign, then the biased exponent."""
    rows = (wide.view(torch.int64) >> _MANTISSA_BITS) & (2 * _EXPONENTS - 1)
    counts: npt.NDArray[np.int64] = torch.bincount(rows, minlength=2 * _EXPONENTS).cpu().numpy()
    return counts


def _take_zeros(counts: npt.NDArray[np.int64], wide: Tensor, *, may_be_subnormal: bool) -> int:
    """Take the zeros out of the rows with exponent bits 0; what stays there are subnormals."""
    low_rows = counts[::_EXPONENTS]
    zeros = int(low_rows.sum())
    low_rows[:] = 0
    # only float64 itself holds its subnormals: whatever is widened to it is normal there
    if may_be_subnormal and zeros:
        normal = sys.float_info.min
        low_rows[0] = int(((wide > 0) & (wide < normal)).sum())
        low_rows[1] = int(((wide < 0) & (wide > -normal)).sum())
    return zeros - int(low_rows.sum())


def _exponent_counts(rows: npt.NDArray[np.int64]) -> ExponentCounts:
    """Clip float64 exponents to the rows kept."""
    by_exponent = rows.reshape(2, _EXPONENTS)[::-1].T  # negative values first
    first, last = LOWEST_EXPONENT + _EXPONENT_BIAS, HIGHEST_EXPONENT + _EXPONENT_BIAS
    kept = by_exponent[first : last + 1].copy()
    kept[0] += by_exponent[:first].sum(axis=0)
    kept[-1] += by_exponent[last + 1 :].sum(axis=0)
    return ExponentCounts.of_rows(LOWEST_EXPONENT, kept)
