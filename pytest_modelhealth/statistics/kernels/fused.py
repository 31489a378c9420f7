"""The fused kernel: everything in one pass over a CPU tensor's memory, in compiled C.

What it does not read goes to `plain`: integers, other devices, and everything where the compiled
library is missing. Sums run in a fixed order, so that all CPUs give the same bits.
Why C, and what it costs: docs/decisions/0005-fused-kernel.md.
"""

from __future__ import annotations

import math
import threading
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from pytest_modelhealth.statistics import native
from pytest_modelhealth.statistics.exponents import ExponentCounts
from pytest_modelhealth.statistics.kernels import plain
from pytest_modelhealth.statistics.kernels.kernel import Extremes, KernelResult
from pytest_modelhealth.statistics.moments import Moments
from pytest_modelhealth.statistics.native import Found, Job, Layout, PackedJob, Results

EXACT_HISTOGRAM = 1 << 14
"""A tensor of up to this many elements has all of them in its histogram. Counting bins takes three
times as long as all the rest."""

LEAST_SAMPLED = 1 << 13
"""A larger tensor has at least this many."""

MOST_SKIPPED = 64
"""At least one value in this many is in the histogram of a large tensor."""

PART = 1 << 15
"""About as many elements are summarized by themselves, so that threads can share a tensor of two
such parts or more: as torch, which gives each thread at least 32768 elements."""

_SHORT_RUN = 16
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
    wanted = job(values, dim)
    return None if wanted is None else summarize_packed(PackedJob(wanted.layout), wanted.address)


def summarize_packed(
    wanted: PackedJob, address: int
) -> tuple[KernelResult, Extremes | None] | None:
    """Return what `summarize_compiled` does of the tensor whose first element is at `address`."""
    results = _own.results
    place, _ = results.reduce_packed(wanted, address)
    found = results[place]
    decoded = None if found.out_of_range else decode(_copied(found))
    results.clear()
    return decoded


def job(values: Tensor, dim: int | None, samples: int = 0) -> Job | None:
    """Return how the compiled kernel reads a tensor, or ``None`` where only `plain` can.

    Args:
        values: real and strided, or anything else that is then not for the kernel.
        dim: the dimension of the units; ``None`` for no units.
        samples: the length of dimension 0 if its slices are compared with each other, else 0; they
            are not where they are scattered in memory, as ``layout.samples`` says then.
    """
    code = _DTYPES.get(values.dtype)
    if code is None or not values.is_cpu or not values.numel() or native.library() is None:
        return None
    # unlike data_ptr, this does not make a lazy copy real
    storage = torch._C._data_address(values)  # type: ignore[attr-defined]
    address = storage + values.storage_offset() * values.itemsize
    strides = None if values.is_contiguous() else values.stride()
    return Job(address, _layout(code, values.shape, strides, dim, samples))


def decode(found: Found) -> tuple[KernelResult, Extremes | None]:
    """Return what `summarize_units` does; `found` is not out of range."""
    result = KernelResult(
        nan_count=found.nans,
        positive_inf_count=found.positive_infs,
        negative_inf_count=found.negative_infs,
        zero_count=found.zeros,
        moments=Moments(found.finite, found.mean, found.std),
        min=found.min,
        max=found.max,
        exponents=ExponentCounts(found.lowest, found.rows),
        histogram_sampled=bool(found.is_sampled),
    )
    return result, None if found.extremes is None else (found.extremes[0], found.extremes[1])


def _copied(found: Found) -> Found:
    extremes = None if found.extremes is None else found.extremes.copy()
    return found._replace(rows=found.rows.copy(), extremes=extremes, alive=None)


class _Own(threading.local):
    """Results of a thread, for tensors that are reduced and read out one by one."""

    @cached_property
    def results(self) -> Results:
        """Made when asked for: without a compiled library there are none, and no error here."""
        return Results()


_own = _Own()


@lru_cache(maxsize=4096)
def _layout(
    code: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...] | None,
    dim: int | None,
    samples: int,
) -> Layout:
    """Return the layout of a tensor; no strides are those of a contiguous one."""
    count = math.prod(shape)
    one_in = 1 if count <= EXACT_HISTOGRAM else min(count // LEAST_SAMPLED, MOST_SKIPPED)
    if strides is None:
        run = 1 if dim is None else math.prod(shape[dim + 1 :])
        return Layout(code, count, (), (), *_cells(shape, dim, run), one_in, PART, samples)
    order = sorted(range(len(shape)), key=strides.__getitem__, reverse=True)
    run = 1 if dim is None else math.prod(shape[d] for d in order[order.index(dim) + 1 :])
    sizes, steps = _joined([(shape[d], strides[d]) for d in order])
    if len(sizes) == 1 and steps[0] == 1:
        sizes, steps = [], []
    outermost = next((d for d in order if shape[d] > 1), None)
    if sizes or outermost != 0:
        samples = 0
    return Layout(code, count, sizes, steps, *_cells(shape, dim, run), one_in, PART, samples)


def _cells(shape: tuple[int, ...], dim: int | None, run: int) -> tuple[int, int, int]:
    """Return units, cells and run; short runs are quicker with a cell for each element."""
    if dim is None:
        return 0, 1, 1
    units = shape[dim]
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
