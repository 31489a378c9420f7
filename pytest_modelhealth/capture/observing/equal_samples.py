"""Tells whether a layer gives the same for every sample of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from pytest_modelhealth.statistics import Entry


def equal_samples(tensors: list[Tensor], samples: int, known: list[Entry | None]) -> bool | None:
    """Return whether in each tensor with a batch dimension all samples have equal values.

    A tensor has one if its dimension 0 is as large as the batch, `samples`.

    Args:
        tensors: the tensors.
        samples: the size of the batch.
        known: the entry of each, ``None`` for a tensor without one.

    Returns:
        ``None`` where there are fewer than two samples, no such tensor, or one that cannot be read
        at once: on another device a look would wait for it.
    """
    if samples < 2:
        return None
    if len(known) == 1 and known[0] is not None and known[0].samples_equal is not None:
        return known[0].samples_equal  # most layers give one tensor
    equal = None
    for tensor, entry in zip(tensors, known, strict=True):
        settled = None if entry is None else entry.samples_equal
        if settled is None:
            if not _has_samples(tensor, samples):
                continue
            if (entry is not None and entry.waits) or not _is_readable(tensor):
                return None
            settled = _rows_are_equal(tensor)
        if not settled:
            return False
        equal = True
    return equal


def _has_samples(tensor: Tensor, samples: int) -> bool:
    if type(tensor) is not Tensor and _keeps_its_values(tensor):
        return False
    return not tensor.is_nested and tensor.ndim > 0 and tensor.shape[0] == samples


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
    """Compare two samples, which nearly always differ, before the rest."""
    with torch.no_grad():
        return torch.equal(tensor[0], tensor[1]) and torch.equal(tensor[1:], tensor[:-1])
