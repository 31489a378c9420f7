"""How far the tensors of two runs are apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Differences, by the root mean square, that another order of the same additions may make."""


class Apart(NamedTuple):
    """How far two tensors are apart where they should be equal, at most.

    The effect is by the root mean square of the finite numbers of the first tensor, and infinite
    where a number is finite in one of them alone.
    """

    effect: float
    place: tuple[int, ...]
    before: float
    after: float


def apart(before: Tensor, after: Tensor, same: Tensor | None = None) -> Apart | None:
    """Return how far two tensors are apart; ``None`` where they hold no numbers to hold together.

    The mask of where they should be equal broadcasts to their shape; ``None`` is everywhere.
    """
    is_plain = before.layout is after.layout is torch.strided and not before.is_quantized
    if before.is_nested or not is_plain or before.shape != after.shape or not before.numel():
        return None
    with torch.no_grad():
        a, b = _real(before), _real(after)
        if same is not None and before.is_complex():
            same = same.unsqueeze(-1)
        scale = _rms(a) or _rms(b)
        if not math.isfinite(scale):
            return None
        difference = (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        difference = difference.masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)
        if same is not None:
            difference = difference.masked_fill(~same, 0.0)
        index = int(difference.argmax())
        most = float(difference.reshape(-1)[index])
        place = tuple(int(n) for n in np.unravel_index(index, a.shape))
        return Apart(
            most / scale if scale else 0.0,
            place[: before.ndim],
            float(a.reshape(-1)[index]),
            float(b.reshape(-1)[index]),
        )


def least_apart(before: Tensor, after: Tensor, masks: Iterable[Tensor]) -> Apart | None:
    """Return how far two tensors are apart, in that way to read their dimensions which is least.

    What another order of the same additions explains is an effect of 0.
    """
    ways = (apart(before, after, mask) for mask in masks)
    least = min((way for way in ways if way is not None), default=None)
    is_noise = least is not None and least.effect <= _ROUNDING.get(before.dtype, 1e-5)
    return least._replace(effect=0.0) if least and is_noise else least


def largest(before: Sequence[Tensor], after: Sequence[Tensor]) -> Apart | None:
    """Return how far the two are apart that differ most, of tensors in the same places."""
    differences = [apart(a, b) for a, b in zip(before, after, strict=False)]
    return max((one for one in differences if one is not None), default=None)


def are_apart(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    """Whether two runs return other tensors, or other numbers in them; a NaN is as another."""
    difference = largest(before, after)
    has_moved = difference is not None and difference.effect > 0.0
    return has_moved or [t.shape for t in before] != [t.shape for t in after]


def _rms(values: Tensor) -> float:
    """Return the root mean square of the finite numbers, NaN where there are none."""
    return float(values[values.isfinite()].square().mean().sqrt())


def _real(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.to(torch.float64)
