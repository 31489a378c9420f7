"""`find_kind`: how the compiled kernel reads a tensor, worked out once for all of its kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pytest_modelhealth.statistics import native
from pytest_modelhealth.statistics.native import Job
from pytest_modelhealth.statistics.tensor_statistics import Subject

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


class Kind(NamedTuple):
    """What CPU tensors of one shape, dtype and layout have in common.

    Args:
        subject: what is known of each.
        job: how the kernel reads them.
        itemsize: bytes an element.
        has_units: whether there are units.
        compares_samples: whether the kernel compares their samples.
    """

    subject: Subject
    job: Job
    itemsize: int
    has_units: bool
    compares_samples: bool


def find_kind(tensor: Tensor, unit_dim: int | None, samples: int = 0) -> tuple[Kind | None, int]:
    """Return how the compiled kernel reads a tensor, and the address of its first element.

    It reads what is dense, on the CPU, and as it lies in memory: no subclass, no view that is yet
    to be negated or conjugated, nothing of a functional transform, and nothing that FSDP freed. For
    anything else the two are ``None`` and 0.

    Args:
        tensor: any tensor.
        unit_dim: the dimension of the units; ``None`` for no units.
        samples: compare the samples of a tensor that has as many in dimension 0; 0 for none.

    Raises:
        IndexError: the tensor has no dimension `unit_dim`.
    """
    if (
        type(tensor) not in _PLAIN_TYPES
        or not tensor.is_cpu
        or tensor.layout is not _STRIDED
        or tensor.is_neg()
        or _is_transformed(tensor)
    ):
        return None, 0
    storage = _address(tensor)
    if not storage:  # FSDP freed it
        return None, 0
    try:
        stride = None if tensor.is_contiguous() else tensor.stride()
        key = (tensor.shape, tensor.dtype, unit_dim, samples, stride)
    except RuntimeError:  # a nested one
        return None, 0
    try:
        kind = _kinds[key]
    except KeyError:
        if len(_kinds) >= _MOST_KINDS:
            _kinds.clear()
        kind = _kinds[key] = _new_kind(tensor, unit_dim, samples)
    if kind is None:
        return None, 0
    return kind, storage + tensor.storage_offset() * kind.itemsize  # type: ignore[return-value]


# looked up once: this runs for every tensor of a step
_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})
_STRIDED = torch.strided
_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
_address: Callable[[Tensor], int] = torch._C._data_address  # type: ignore[attr-defined]
"""Unlike ``data_ptr``, this does not make a lazy copy real."""

_kinds: dict[tuple[object, ...], Kind | None] = {}
_MOST_KINDS = 4096


def _new_kind(tensor: Tensor, unit_dim: int | None, samples: int) -> Kind | None:
    shape, count = tuple(tensor.shape), tensor.numel()
    dim = None if unit_dim is None else range(tensor.ndim)[unit_dim]
    if tensor.dtype not in _DTYPES or not count or native.library() is None:
        return None
    order = list(range(tensor.ndim))
    if not tensor.is_contiguous():
        order.sort(key=tensor.stride, reverse=True)
    sizes, strides = _joined([(shape[d], tensor.stride(d)) for d in order])
    if strides == [1]:  # dense
        sizes, strides = [], []
    outermost = next((d for d in order if shape[d] > 1), None)
    compared = samples if not sizes and outermost == 0 and shape[0] == samples else 0
    one_in = 1 if count <= EXACT_HISTOGRAM else min(count // LEAST_SAMPLED, MOST_SKIPPED)
    units = _units([shape[d] for d in order], None if dim is None else order.index(dim))
    job = Job(_DTYPES[tensor.dtype], count, sizes, strides, *units, one_in, PART, compared)
    return Kind(
        Subject.of(tensor, shape, count, dim), job, tensor.itemsize, dim is not None, compared > 1
    )


def _units(sizes: Sequence[int], dim: int | None) -> tuple[int, int, int]:
    """Return units, cells and run; short runs are quicker with a cell for each element.

    Args:
        sizes: of the dimensions in the order of memory.
        dim: which of them the units have; ``None`` for no units.
    """
    if dim is None:
        return 0, 1, 1
    units, run = sizes[dim], math.prod(sizes[dim + 1 :])
    if run < _SHORT_RUN and units * run <= _MANY_CELLS:
        return units, units * run, 1
    return units, units, run


def _joined(dimensions: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
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
