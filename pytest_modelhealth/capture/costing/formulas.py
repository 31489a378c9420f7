"""Formulas for fused kernels that torch's flop counter passes over, by its own convention.

A multiplication and an addition are two operations. Only the matrix products are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import sdpa_flop_count

Shape = Sequence[int]
Formula = Callable[..., int]


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _multihead(query: Shape, key: Shape, value: Shape, width: int, *_: Any, **__: Any) -> int:
    """Count projections and attention of the path that `nn.MultiheadAttention` has in evaluation.

    Its tensors are of shape (samples, length, features).
    """
    samples, length, _width = query
    projections = 2 * samples * width * width * (length + key[1] + value[1] + length)
    return projections + 4 * samples * length * key[1] * width


def _onednn_recurrence(
    inputs: Shape, over_input: Shape, over_state: Shape, *_: Any, **__: Any
) -> int:
    """Count one layer in one direction: each step is multiplied by both matrices."""
    return 2 * inputs[0] * inputs[1] * (_elements(over_input) + _elements(over_state))


def _cudnn_recurrence(inputs: Shape, weights: Sequence[Shape], *_: Any, **__: Any) -> int:
    """Count all layers: inputs are (steps, samples, features), or (rows, features) where packed."""
    rows = _elements(inputs[:-1])
    return 2 * rows * sum(_elements(weight) for weight in weights if len(weight) == 2)


def _elements(shape: Shape) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


_BY_NAME: dict[str, Formula] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_fused_attention_overrideable": _attention,
    "_native_multi_head_attention": _multihead,
    "mkldnn_rnn_layer": _onednn_recurrence,
    "_cudnn_rnn": _cudnn_recurrence,
    "miopen_rnn": _cudnn_recurrence,
}


def own_formulas() -> dict[Any, Formula]:
    """Return the formula of each operator that this version of torch has, for its counter."""
    aten = torch.ops.aten
    return {getattr(aten, name): made for name, made in _BY_NAME.items() if hasattr(aten, name)}
