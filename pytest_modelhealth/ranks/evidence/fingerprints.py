"""Numbers that tell tensors apart, to the last bit."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

from pytest_modelhealth.statistics import TensorStatistics

_PIECE = 1 << 22


def fingerprint(tensor: Tensor) -> int:
    """Return a number that equal tensors share: of shape, dtype and every bit, in their order.

    On the CPU it is `zlib.crc32`, which reads 1 GB/s. On another device the bits are multiplied by
    odd numbers that depend on their place and summed there, modulo 2**64.
    """
    tensor = tensor.detach()
    begun = zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
    if not tensor.numel() or tensor.device.type == "meta":
        return begun
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        return zlib.crc32(flat.numpy().data, begun)
    return _summed(flat, begun)


def _summed(flat: Tensor, begun: int) -> int:
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(flat), _PIECE):
        piece = flat[start : start + _PIECE].long()
        place = torch.arange(start, start + len(piece), device=flat.device)
        odd = (place * 0x9E3779B97F4A7C1 + begun) | 1
        odd = (odd ^ (odd >> 29)) * 0x3F58476D1CE4E5B9 | 1
        total += ((piece + 1) * odd).sum()
    return int(total) & 0x7FFFFFFFFFFFFFFF


def combined(numbers: Iterable[object]) -> int:
    """Return one number of several things that are equal where their texts are."""
    return zlib.crc32("|".join(map(repr, numbers)).encode(errors="backslashreplace"))


def of_statistics(statistics: TensorStatistics | None) -> int:
    """Return a number that equal statistics share, those of a tensor equal to the last bit."""
    if statistics is None:
        return 0
    s = statistics
    return combined(
        (s.shape, s.dtype, s.count, s.mean, s.std, s.min, s.max, s.zero_count, s.nan_count)
    )
