"""The fused kernel: everything in one pass over a CPU tensor's memory, in compiled C.

What it does not read goes to `plain`: integers, other devices, and everything where the compiled
library is missing. Sums run in a fixed order, so that all CPUs give the same bits.
Why C, and what it costs: docs/decisions/0005-fused-kernel.md.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pytest_modelhealth.statistics import native
from pytest_modelhealth.statistics.exponents import (
    HIGHEST_EXPONENT,
    LOWEST_EXPONENT,
    ExponentCounts,
)
from pytest_modelhealth.statistics.kernels import plain
from pytest_modelhealth.statistics.kernels.kernel import KernelResult
from pytest_modelhealth.statistics.moments import Moments
from pytest_modelhealth.statistics.native import Found, Layout

Extremes = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]

EXACT_HISTOGRAM = 1 << 14
"""A tensor of up to this many elements has all of them in its histogram, a larger one at least as
many. Counting bins takes four times as long as all the rest."""

MOST_SKIPPED = 64
"""At least one value in this many is in the histogram of a large tensor."""

ENOUGH_NONZERO = 1024
"""A sample with fewer non-zero values than this says little: all are counted."""

_SHORT_RUN = 256
_MANY_CELLS = 1 << 16  # their extremes stay in the second-level cache
_DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


def summarize(values: Tensor) -> KernelResult:
    """Return the counts, moments, extremes and exponents of real, strided `values`."""
    return summarize_units(values, None)[0]


def unit_extremes(values: Tensor, dim: int) -> Extremes:
    """Return the least and the greatest value at each index of `dim`; NaN where there is one.

    Args:
        values: real and strided, with at least one element.
        dim: from 0 to ``values.ndim - 1``.
    """
    extremes = summarize_units(values, dim)[1]
    assert extremes is not None
    return extremes


def summarize_units(values: Tensor, dim: int | None) -> tuple[KernelResult, Extremes | None]:
    """Return what `summarize` and `unit_extremes` do, from one pass over the memory.

    With no `dim`, or no element, the extremes are ``None``.
    """
    found = summarize_compiled(values, dim)
    if found is not None:
        return found
    if dim is None or not values.numel():
        return plain.summarize(values), None
    return plain.summarize(values), plain.unit_extremes(values, dim)


def summarize_compiled(
    values: Tensor, dim: int | None
) -> tuple[KernelResult, Extremes | None] | None:
    """Return what `summarize_units` does, or ``None`` where only `plain` can."""
    code = _DTYPES.get(values.dtype)
    if code is None or not values.is_cpu or not values.numel() or native.library() is None:
        return None
    layout = _layout(values, code, dim)
    # unlike data_ptr, this does not make a lazy copy real
    storage = torch._C._data_address(values)  # type: ignore[attr-defined]
    address = int(storage + values.storage_offset() * values.itemsize)
    found = native.reduce(address, layout, _one_in(layout.elements))
    nonzero = found.finite - found.zeros
    if found.sampled < found.finite and found.rows.sum() < min(ENOUGH_NONZERO, nonzero):
        found = native.reduce(address, layout, 1)
    if code == _DTYPES[torch.float64] and not _is_in_range(found):
        return None
    return _result(found), _extremes(found)


def _one_in(count: int) -> int:
    """Return how many values there are for each that enters the histogram."""
    return min(max(count // EXACT_HISTOGRAM, 1), MOST_SKIPPED)


def _layout(values: Tensor, code: int, dim: int | None) -> Layout:
    count, shape = values.numel(), values.shape
    if values.is_contiguous():
        run = 1 if dim is None else math.prod(shape[dim + 1 :])
        units = _cells(0 if dim is None else shape[dim], run)
        return Layout(code, count, None, None, *units)
    order = sorted(range(values.ndim), key=values.stride, reverse=True)
    run = 1 if dim is None else math.prod(shape[d] for d in order[order.index(dim) + 1 :])
    units = _cells(0 if dim is None else shape[dim], run)
    sizes, strides = _joined([(shape[d], values.stride(d)) for d in order])
    if len(sizes) == 1 and strides[0] == 1:
        return Layout(code, count, None, None, *units)
    return Layout(code, count, np.array(sizes), np.array(strides), *units)


def _cells(units: int, run: int) -> tuple[int, int, int]:
    """Return units, cells and run; short runs are quicker with a cell for each element."""
    if not units:
        return 0, 1, 1
    if run < _SHORT_RUN and units * run <= _MANY_CELLS:
        return units, units * run, 1
    return units, units, run


def _joined(dimensions: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Join neighbouring dimensions that are one in memory, so that rows are as long as can be."""
    sizes, strides = [1], [1]
    for size, stride in dimensions:
        if size == 1:
            continue
        if sizes[-1] == 1 or strides[-1] == size * stride:
            sizes[-1], strides[-1] = sizes[-1] * size, stride
        else:
            sizes.append(size)
            strides.append(stride)
    return sizes, strides


def _moments(found: Found) -> Moments:
    if not found.finite:
        return Moments()
    return Moments(int(found.finite), found.mean, math.sqrt(found.deviations / found.finite))


def _is_in_range(found: Found) -> bool:
    """Whether no square left the range of float64."""
    if not found.finite or found.low == found.high == 0.0:
        return True
    return 2.0**-450 < max(-found.low, found.high) < 2.0**500


def _extremes(found: Found) -> Extremes | None:
    return None if found.extremes is None else (found.extremes[0], found.extremes[1])


def _result(found: Found) -> KernelResult:
    is_sampled = found.sampled < found.finite and len(found.rows) > 0
    rows, lowest = found.rows, int(found.lowest)
    exponents = ExponentCounts(lowest, rows) if len(rows) else ExponentCounts()
    return KernelResult(
        nan_count=int(found.nans),
        positive_inf_count=int(found.positive_infs),
        negative_inf_count=int(found.negative_infs),
        zero_count=int(found.zeros),
        moments=_moments(found),
        min=found.low if found.finite else math.nan,
        max=found.high if found.finite else math.nan,
        exponents=_scaled(exponents, found) if is_sampled else exponents,
        histogram_sampled=is_sampled,
    )


def _scaled(sample: ExponentCounts, found: Found) -> ExponentCounts:
    """Scale a sample to the exact number of non-zero values; what rounding cuts goes to the mode.

    The least and the greatest value are counted once where the sample missed their bins.
    """
    missed = _missed_extremes(sample, found)
    total = int(found.finite - found.zeros) - int(missed.counts.sum())
    counts = (sample.counts * (total / sample.counts.sum())).astype(np.int64)
    counts.flat[counts.argmax()] += total - counts.sum()
    return ExponentCounts(sample.lowest, counts).add(missed)


def _missed_extremes(sample: ExponentCounts, found: Found) -> ExponentCounts:
    missed = ExponentCounts()
    for extreme in (found.low, found.high):
        exponent = math.frexp(extreme)[1] - 1
        exponent = min(max(exponent, LOWEST_EXPONENT), HIGHEST_EXPONENT)
        sign = int(extreme > 0)
        if extreme and not _has(sample, exponent, sign) and not _has(missed, exponent, sign):
            row = np.zeros((1, 2), dtype=np.int64)
            row[0, sign] = 1
            missed = missed.add(ExponentCounts(exponent, row))
    return missed


def _has(counts: ExponentCounts, exponent: int, sign: int) -> bool:
    if not counts.lowest <= exponent <= counts.highest:
        return False
    return bool(counts.counts[exponent - counts.lowest, sign])
