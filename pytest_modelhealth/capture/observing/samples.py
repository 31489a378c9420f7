"""Tells whether a layer gives the same for every sample of a batch."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

_PROBE = 256
_BUT_TOP_BITS = int.from_bytes(b"\x7f" * _PROBE, "little")
_SMALL = 1 << 14
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.float16: np.float16}


def equal_samples(tensors: Iterable[Tensor], samples: int) -> bool | None:
    """Return whether in each tensor with a batch dimension all samples have equal values.

    A tensor has one if its dimension 0 is as large as the batch, `samples`.

    Returns:
        ``None`` where there are fewer than two samples, no such tensor, or one that cannot be read
        at once: on another device a look would wait for it.
    """
    if samples < 2:
        return None
    equal = None
    for tensor in tensors:
        if type(tensor) is not Tensor and _keeps_its_values(tensor):
            continue
        if tensor.is_nested:
            continue
        if not tensor.ndim or tensor.shape[0] != samples:
            continue
        if not _is_readable(tensor):
            return None
        if not _rows_are_equal(tensor):
            return False
        equal = True
    return equal


def _keeps_its_values(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def _is_readable(tensor: Tensor) -> bool:
    return bool(
        tensor.is_cpu
        and tensor.layout is torch.strided
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and tensor.numel() > 0
        and torch._C._data_address(tensor) != 0  # type: ignore[attr-defined]  # FSDP frees it
    )


def _rows_are_equal(tensor: Tensor) -> bool:
    """Compare the first bytes of two samples, which nearly always differ, before the rest."""
    known = _known_from_memory(tensor) if tensor.is_contiguous() else None
    if known is not None:
        return known
    with torch.no_grad():
        return torch.equal(tensor[0], tensor[1]) and torch.equal(tensor[1:], tensor[:-1])


def _known_from_memory(tensor: Tensor) -> bool | None:
    """Return whether the samples are equal, or ``None`` where their bytes do not settle it.

    Memory is read directly: two views and a comparison cost as much as the rest of a small layer.
    Zeros differ in their sign bit and are equal, so bytes that differ in their top bit only settle
    nothing.
    """
    size, samples = tensor.numel() * tensor.itemsize, tensor.shape[0]
    row = size // samples
    # unlike data_ptr, this does not make a lazy copy real
    start: int = torch._C._data_address(tensor)  # type: ignore[attr-defined]
    start += int(tensor.storage_offset()) * tensor.itemsize
    probe = min(row, _PROBE)
    first, second = ctypes.string_at(start, probe), ctypes.string_at(start + row, probe)
    if (
        first != second
        and (int.from_bytes(first, "little") ^ int.from_bytes(second, "little")) & _BUT_TOP_BITS
    ):
        return False
    if size <= _SMALL:
        whole = ctypes.string_at(start, size)
        if whole == whole[:row] * samples:
            return True
        if tensor.dtype in _NUMPY:
            values = np.frombuffer(whole, _NUMPY[tensor.dtype]).reshape(samples, -1)
            return bool((values[1:] == values[:-1]).all())
    return None
