"""What operators of ONNX are in torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from pytest_modelhealth.capture.deployed.program import activation_called
from pytest_modelhealth.layers import ACTIVATION_MODULES

_ACTIVATIONS = {
    "Celu": nn.CELU,
    "Elu": nn.ELU,
    "Gelu": nn.GELU,
    "HardSigmoid": nn.Hardsigmoid,
    "HardSwish": nn.Hardswish,
    "LeakyRelu": nn.LeakyReLU,
    "LogSoftmax": nn.LogSoftmax,
    "Mish": nn.Mish,
    "PRelu": nn.PReLU,
    "Relu": nn.ReLU,
    "Selu": nn.SELU,
    "Sigmoid": nn.Sigmoid,
    "Softmax": nn.Softmax,
    "Softplus": nn.Softplus,
    "Softsign": nn.Softsign,
    "Swish": nn.SiLU,
    "Tanh": nn.Tanh,
    "ThresholdedRelu": nn.Threshold,
}
_WITH_WEIGHTS = {
    "BatchNormalization": nn.BatchNorm2d,
    "Gemm": nn.Linear,
    "GRU": nn.GRU,
    "Gather": nn.Embedding,
    "GroupNormalization": nn.GroupNorm,
    "InstanceNormalization": nn.InstanceNorm2d,
    "LSTM": nn.LSTM,
    "LayerNormalization": nn.LayerNorm,
    "MatMul": nn.Linear,
    "RMSNormalization": nn.RMSNorm,
    "RNN": nn.RNN,
}
_CONVOLUTIONS = {
    "Conv": (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    "ConvTranspose": (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
}
_MATERIAL = frozenset({"Cast", "Constant", "Identity", "Shape"})
"""Operators that make up no layer."""
_MOST_PARTS = 2
"""A linear layer is two operators at most: a product and a sum."""


def function_of(operator: str) -> Callable[..., Any] | None:
    """Return the function of `torch.nn.functional` of an activation, else ``None``."""
    kind = _ACTIVATIONS.get(operator)
    return None if kind is None else activation_called(ACTIVATION_MODULES[kind])


def is_activation(operator: str) -> bool:
    """Whether an operator is an activation by itself, be it one that torch has under this name."""
    return operator in _ACTIVATIONS or operator == "Clip"  # relu6, hardtanh


def is_rounding(operator: str) -> bool:
    """Whether an operator brings values to eight bits, or back."""
    return operator in ("QuantizeLinear", "DequantizeLinear")


def class_of(nodes: Sequence[Any], state: Mapping[str, Any]) -> str:
    """Return the qualified name of torch's class of a layer that consists of these nodes.

    Args:
        nodes: the nodes, as protos.
        state: initializers by name.

    Returns:
        ``""`` where they are no layer of torch's for sure.
    """
    parts = [node for node in nodes if node.op_type not in _MATERIAL]
    operators = list(dict.fromkeys(node.op_type for node in parts))
    if not operators or len(operators) > _MOST_PARTS:
        return ""
    weights = [state[name] for name in parts[0].input if name in state]
    kind = _class(operators, len(weights[0].dims) if weights else None)
    return "" if kind is None else f"{kind.__module__}.{kind.__qualname__}"


def _class(operators: list[str], dimensions: int | None) -> type[nn.Module] | None:
    operator = operators[0]
    if operator in _ACTIVATIONS:
        return _ACTIVATIONS[operator] if len(operators) == 1 else None
    if dimensions is None:
        return None
    if operator in _CONVOLUTIONS:
        kinds = dict(enumerate(_CONVOLUTIONS[operator], 3))
        return kinds.get(dimensions)
    return _WITH_WEIGHTS.get(operator)
