"""What operators of ONNX are in torch: their layers, and how those are set up by torch's names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from pytest_modelhealth.capture.deployed.program import activation_called
from pytest_modelhealth.layers import ACTIVATION_MODULES

_EPSILON = {"epsilon": "eps"}
_WINDOW = {"pads": "padding", "strides": "stride", "dilations": "dilation"}
_CONVOLUTION = {**_WINDOW, "group": "groups", "output_padding": "output_padding"}
_POOL = {**_WINDOW, "kernel_shape": "kernel_size", "ceil_mode": "ceil_mode"}
_GATES = {"hidden_size": "hidden_size", "activations": "activations", "direction": "bidirectional"}
_AFTER_INPUT = {"weight": 1, "bias": 2}


class Kind(NamedTuple):
    """What an operator is in torch.

    Args:
        layer: the name of the class of a layer that it computes.
        settings: torch's name for each attribute that it has one for.
        places: which of its inputs is which parameter or buffer.
    """

    layer: str
    settings: Mapping[str, str] = {}
    places: Mapping[str, int] = {}


KINDS: Mapping[str, Kind] = {
    "AveragePool": Kind("", {**_POOL, "count_include_pad": "count_include_pad"}),
    "BatchNormalization": Kind(
        "BatchNorm2d", _EPSILON, {**_AFTER_INPUT, "running_mean": 3, "running_var": 4}
    ),
    "Celu": Kind("CELU", {"alpha": "alpha"}),
    "Conv": Kind("Conv2d", _CONVOLUTION, _AFTER_INPUT),
    "ConvInteger": Kind("Conv2d", _CONVOLUTION, {"weight": 1}),
    "ConvTranspose": Kind("ConvTranspose2d", _CONVOLUTION, _AFTER_INPUT),
    "DepthToSpace": Kind("", {"blocksize": "upscale_factor"}),
    "Elu": Kind("ELU", {"alpha": "alpha"}),
    "GRU": Kind("GRU", {**_GATES, "linear_before_reset": "linear_before_reset"}),
    "Gather": Kind("Embedding", {}, {"weight": 0}),
    "Gelu": Kind("GELU", {"approximate": "approximate"}),
    "Gemm": Kind("Linear", {"transA": "transA"}, _AFTER_INPUT),
    "GroupNormalization": Kind("GroupNorm", {**_EPSILON, "num_groups": "num_groups"}),
    "HardSigmoid": Kind("Hardsigmoid", {"alpha": "alpha", "beta": "beta"}),
    "HardSwish": Kind("Hardswish"),
    "InstanceNormalization": Kind("InstanceNorm2d", _EPSILON),
    "LSTM": Kind("LSTM", {**_GATES, "input_forget": "input_forget"}),
    "LayerNormalization": Kind("LayerNorm", _EPSILON, _AFTER_INPUT),
    "LeakyRelu": Kind("LeakyReLU", {"alpha": "negative_slope"}),
    "LogSoftmax": Kind("LogSoftmax", {"axis": "dim"}),
    "MatMul": Kind("Linear", {}, {"weight": 1}),
    "MatMulInteger": Kind("Linear", {}, {"weight": 1}),
    "MaxPool": Kind("", _POOL),
    "Mish": Kind("Mish"),
    "PRelu": Kind("PReLU"),
    "RMSNormalization": Kind("RMSNorm", _EPSILON, {"weight": 1}),
    "RNN": Kind("RNN", _GATES),
    "Relu": Kind("ReLU"),
    "Selu": Kind("SELU", {"alpha": "alpha", "gamma": "gamma"}),
    "Sigmoid": Kind("Sigmoid"),
    "Softmax": Kind("Softmax", {"axis": "dim"}),
    "Softplus": Kind("Softplus"),
    "Softsign": Kind("Softsign"),
    "Swish": Kind("SiLU"),
    "Tanh": Kind("Tanh"),
    "ThresholdedRelu": Kind("Threshold", {"alpha": "threshold"}),
}
_NONE = Kind("")
_MATERIAL = frozenset({"Cast", "Constant", "Identity", "Shape"})
"""Operators that make up no layer."""
_MOST_PARTS = 2
"""A linear layer is two operators at most: a product and a sum."""


def kind_of(operator: str) -> Kind:
    """Return what an operator is in torch; a fused one is what it begins with."""
    return KINDS.get(operator.removeprefix("Fused"), _NONE)


def function_of(operator: str) -> Callable[..., Any] | None:
    """Return the function of `torch.nn.functional` of an activation, else ``None``."""
    name = ACTIVATION_MODULES.get(getattr(nn, kind_of(operator).layer, nn.Module))
    return None if name is None else activation_called(name)


def is_activation(operator: str) -> bool:
    """Whether an operator is an activation by itself, be it one that torch has under this name."""
    return operator == "Clip" or function_of(operator) is not None  # relu6, hardtanh


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
    operators = {node.op_type for node in parts}
    name = kind_of(parts[0].op_type).layer if parts else ""
    if not name or len(operators) > _MOST_PARTS:
        return ""
    weights = [state[name] for name in parts[0].input if name in state]
    if function_of(parts[0].op_type) is not None:
        name = name if len(operators) == 1 else ""
    elif not weights:
        return ""
    elif name.startswith("Conv"):
        name = f"{name[:-2]}{len(weights[0].dims) - 2}d"
    kind = getattr(nn, name, None)
    return "" if kind is None else f"{kind.__module__}.{kind.__qualname__}"


_LEFT_OUT: dict[str, Any] = {"pads": 0, "strides": 1, "dilations": 1, "output_padding": 0}


def settings_of(node: Any, number: Callable[[str], float | None]) -> dict[str, Any]:
    """Return what the attributes of a node say, those left out as well.

    Args:
        node: the node of an ``onnx.GraphProto``.
        number: returns the constant number of a name, where it is one.
    """
    operator = node.op_type.removeprefix("Fused")
    if operator == "Pad":
        return {"pad": True}
    if operator == "Clip":
        found = zip(("min_val", "max_val"), map(number, node.input[1:]), strict=False)
        return {name: value for name, value in found if value is not None}
    attributes = _attributes(node, operator)
    if attributes.get("auto_pad", "NOTSET").startswith("SAME"):
        attributes.pop("pads", None)
    return {
        ours: _in_torch(name, attributes[name], attributes)
        for name, ours in kind_of(operator).settings.items()
        if name in attributes
    }


def _attributes(node: Any, operator: str) -> dict[str, Any]:
    """Return the attributes of a node, those that it leaves out as its operator defines them."""
    from onnx import defs, helper

    declared = defs.get_schema(operator).attributes.values() if defs.has(operator) else ()
    found = {one.name: one.default_value for one in declared if one.default_value.type}
    found |= {one.name: one for one in node.attribute}
    values = {name: _text(helper.get_attribute_value(one)) for name, one in found.items()}
    return _LEFT_OUT | values


def _text(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_text, value))
    return value.decode() if isinstance(value, bytes) else value


def _in_torch(name: str, value: Any, attributes: Mapping[str, Any]) -> Any:
    """Return the value of an attribute as a module of torch has it."""
    is_both = name == "activations" and attributes.get("direction") == "bidirectional"
    if is_both or (name == "pads" and value):  # of both directions, of the begin and the end
        half = len(value) // 2
        return value[:half] if value[:half] == value[half:] else value
    known = {"forward": False, "bidirectional": True}
    return known.get(value, value) if name == "direction" else value
