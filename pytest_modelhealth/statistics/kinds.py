"""`find_kind`: how the compiled kernel reads a tensor, worked out once for all of its kind."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from pytest_modelhealth.statistics.kernels import fused
from pytest_modelhealth.statistics.native import Layout, PackedJob


class Kind:
    """What CPU tensors of one shape, dtype and layout have in common.

    Args:
        tensor: one of them.
        dim: the dimension of the units; ``None`` for no units.
        layout: how the kernel reads them.
    """

    __slots__ = (
        "compares_samples",
        "count",
        "dtype",
        "has_units",
        "itemsize",
        "job",
        "observations",
        "shape",
    )

    def __init__(self, tensor: Tensor, dim: int | None, layout: Layout) -> None:
        self.job = PackedJob(layout)
        self.shape = tuple(tensor.shape)
        self.count = tensor.numel()
        self.dtype = str(tensor.dtype).removeprefix("torch.")
        self.itemsize = tensor.itemsize
        self.has_units = dim is not None
        self.observations = math.prod(self.shape[:dim])
        self.compares_samples = layout.samples > 1


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
        or tensor.is_nested
        or tensor.is_neg()
        or _is_transformed(tensor)
    ):
        return None, 0
    storage = _address(tensor)
    if not storage:  # FSDP freed it
        return None, 0
    key: tuple[object, ...] = (tensor.shape, tensor.dtype, unit_dim, samples)
    if not tensor.is_contiguous():
        key = (*key, tensor.stride())
    try:
        kind = _kinds[key]
    except KeyError:
        kind = _new_kind(key, tensor, unit_dim, samples)
    if kind is None:
        return None, 0
    return kind, storage + int(tensor.storage_offset()) * kind.itemsize


# looked up once: this runs for every tensor of a step
_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})
_STRIDED = torch.strided
_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor
_address: Callable[[Tensor], int] = torch._C._data_address  # type: ignore[attr-defined]
"""Unlike ``data_ptr``, this does not make a lazy copy real."""

_kinds: dict[tuple[object, ...], Kind | None] = {}
_MOST_KINDS = 4096


def _new_kind(
    key: tuple[object, ...], tensor: Tensor, unit_dim: int | None, samples: int
) -> Kind | None:
    dim = None if unit_dim is None else range(tensor.ndim)[unit_dim]
    compared = samples if tensor.ndim and tensor.shape[0] == samples > 1 else 0
    job = fused.job(tensor, dim, compared)
    if len(_kinds) >= _MOST_KINDS:
        _kinds.clear()
    kind = _kinds[key] = None if job is None else Kind(tensor, dim, job.layout)
    return kind
