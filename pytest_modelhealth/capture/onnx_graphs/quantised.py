"""Weights of onnxruntime's quantiser: integers, with a scale and a zero point beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pytest_modelhealth.capture.onnx_graphs.values import tensor_of
from pytest_modelhealth.statistics.quantised import quantised

_VALUES, _SCALE, _ZERO = "_quantized", "_scale", "_zero_point"
_TURNED = "_Transposed"
"""What the quantiser adds to the name of a weight that it turned."""
LINEAR = "torch.nn.modules.linear.Linear"
_TRANSPOSED = frozenset({"MatMul", "MatMulInteger", "QLinearMatMul"})
"""Operators that take a weight as (inputs, outputs)."""
_BACK = "DequantizeLinear"
"""The operator that stands between a weight and what uses it, where values are only rounded."""


def quantised_weights(
    nodes: Iterable[tuple[Any, str]], state: Mapping[str, Any], folder: Path | None
) -> dict[str, Tensor]:
    """Return quantised weights as quantised tensors, by their fully qualified names.

    A weight that lost its name is the ``weight`` of the layer that reads it.

    Args:
        nodes: the nodes, each with the name of its layer.
        state: the initializers by name.
        folder: where their external data lies.
    """
    found = {}
    nodes = list(nodes)
    readers = {name: node.op_type for node, _ in nodes for name in node.input}
    for node, layer in nodes:
        for name in node.input:
            own = name.removesuffix(_VALUES)
            if own == name or not {name, own + _SCALE, own + _ZERO} <= state.keys():
                continue
            parts = [tensor_of(state[own + end], folder) for end in (_VALUES, _SCALE, _ZERO)]
            weight = _quantised(*parts)
            is_named = own.rpartition(".")[0] == layer
            if weight is not None:
                used = readers.get(node.output[0]) if node.op_type == _BACK else node.op_type
                turns = own.endswith(_TURNED) if is_named else used in _TRANSPOSED
                path = own.removesuffix(_TURNED) if is_named else f"{layer}.weight"
                found[path] = weight.t() if turns and weight.ndim == 2 else weight
    return found


def is_nameless_product(node: Any) -> bool:
    """Whether a node multiplies with a quantised weight that has no fully qualified name."""
    weight = node.input[1] if node.op_type == "MatMulInteger" else ""
    return weight.endswith(_VALUES) and "." not in weight


def rounded_from(node: Any, makers: Mapping[str, Any]) -> str:
    """Return the name of the value that a product takes, before it is brought to eight bits."""
    rounding = makers.get(node.input[0])
    return node.input[0] if rounding is None else str(rounding.node.input[0])


def _quantised(values: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor | None:
    """Return integers as a quantised tensor; ``None`` for those of another form."""
    if values.dtype not in (torch.int8, torch.uint8) or scale.numel() != 1:
        return None
    return quantised(values, scale.reshape(()), zero_point.reshape(()))
