"""Quantised tensors, of torch and of libraries: which they are, their steps."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor


def is_quantised(tensor: Any) -> bool:
    """Whether the values of a tensor lie on a grid: of a quantised dtype, or of torchao's kind."""
    return tensor.is_quantized or (is_dequantisable(tensor) or _scale(tensor) is not None)


def is_dequantisable(tensor: Any) -> bool:
    """Whether the class of a tensor has a way of its own to the values that it stands for."""
    return type(tensor).dequantize is not Tensor.dequantize


def step(tensor: Any) -> Tensor | None:
    """Return the distance between two neighbouring values of a quantised tensor.

    Returns:
        One number for each element, in a shape that can be broadcast to the tensor's; of 8-bit
        floats the step at each value. ``None`` where the tensor is not quantised, or keeps its
        steps to itself.
    """
    if tensor.is_quantized:
        return _step_of_torch(tensor)
    scale = _scale(tensor)
    if scale is None:
        return None
    spread = _spread(scale.detach().double().abs(), tensor.shape)
    stored = getattr(tensor, "qdata", None)
    if isinstance(stored, Tensor) and stored.dtype.is_floating_point:
        kind = torch.finfo(stored.dtype)
        least = spread * kind.smallest_normal
        return torch.maximum(tensor.dequantize().detach().double().abs(), least) * kind.eps
    return spread


_LEVELS = 256
"""How many values eight bits have."""

_LEAST_LEVELS = 8
"""Fewer different values than this are no evidence of a grid: a mask has two."""

_OFF_GRID = 1e-3
"""By how many steps values may lie beside a grid: they are its points, rounded to float32."""


def step_of_grid(values: Tensor) -> float:
    """Return the distance between values that all lie on one grid of eight bits.

    Returns:
        0 where they do not, or are too few to say so.
    """
    different = torch.unique(values.double())
    if not _LEAST_LEVELS <= len(different) <= _LEVELS:
        return 0.0
    distances = different - different[0]
    least = float(different.diff().min())
    steps = distances / least
    is_grid = bool(steps[-1] < _LEVELS) and bool((steps - steps.round()).abs().max() < _OFF_GRID)
    return least if is_grid else 0.0


def _step_of_torch(tensor: Tensor) -> Tensor:
    if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return torch.tensor(tensor.q_scale(), dtype=torch.float64)
    shape = [1] * tensor.ndim
    shape[tensor.q_per_channel_axis()] = -1
    return tensor.q_per_channel_scales().double().reshape(shape)


def _scale(tensor: Any) -> Tensor | None:
    """Return the scales that a tensor class of a library keeps beside its whole numbers."""
    if type(tensor) in (Tensor, torch.nn.Parameter):
        return None
    scale = getattr(tensor, "scale", None)
    return scale if isinstance(scale, Tensor) else None


def _spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """Return scales of blocks for each element; the largest for all where it cannot be told."""
    if scale.ndim == len(shape) and not any(
        size % blocks for size, blocks in zip(shape, scale.shape, strict=True)
    ):
        for dim, (size, blocks) in enumerate(zip(shape, scale.shape, strict=True)):
            if blocks not in (1, size):
                scale = scale.repeat_interleave(size // blocks, dim)
        return scale
    return scale.max()


def quantised(
    values: Tensor, scale: Tensor | float, zero_point: Tensor | int, axis: int | None = None
) -> Tensor:
    """Return integers as a quantised tensor of torch, by tensor or by the slices of one dimension.

    torch warns that it will make no such tensors some day, which is no matter of the user's.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if axis is None:
            make = torch._make_per_tensor_quantized_tensor
            return make(values, float(scale), int(zero_point))
        scales, zeros = torch.as_tensor(scale).double(), torch.as_tensor(zero_point).long()
        return torch._make_per_channel_quantized_tensor(values, scales, zeros, axis)
