"""How an operation of an ONNX graph is set up: its attributes by the names that torch has for them.

An attribute that stands in the graph counts. What the exporter noted of the call says the rest,
where one operation of torch became several nodes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

from pytest_modelhealth.capture.graph_settings import of_call

_EPSILON = {"epsilon": "eps"}
_WINDOW = {"pads": "padding", "strides": "stride", "dilations": "dilation"}
_CONVOLUTION = {**_WINDOW, "group": "groups", "output_padding": "output_padding"}
_POOL = {**_WINDOW, "kernel_shape": "kernel_size", "ceil_mode": "ceil_mode"}
_GATES = {"hidden_size": "hidden_size", "activations": "activations", "direction": "bidirectional"}
_NAMES: Mapping[str, Mapping[str, str]] = {
    "AveragePool": {**_POOL, "count_include_pad": "count_include_pad"},
    "BatchNormalization": _EPSILON,
    "Celu": {"alpha": "alpha"},
    "Conv": _CONVOLUTION,
    "ConvInteger": _CONVOLUTION,
    "ConvTranspose": _CONVOLUTION,
    "DepthToSpace": {"blocksize": "upscale_factor"},
    "Elu": {"alpha": "alpha"},
    "GRU": {**_GATES, "linear_before_reset": "linear_before_reset"},
    "Gelu": {"approximate": "approximate"},
    "Gemm": {"transA": "transA"},
    "GroupNormalization": {**_EPSILON, "num_groups": "num_groups"},
    "HardSigmoid": {"alpha": "alpha", "beta": "beta"},
    "InstanceNormalization": _EPSILON,
    "LSTM": {**_GATES, "input_forget": "input_forget"},
    "LayerNormalization": _EPSILON,
    "LeakyRelu": {"alpha": "negative_slope"},
    "LogSoftmax": {"axis": "dim"},
    "MaxPool": _POOL,
    "QLinearConv": _CONVOLUTION,
    "RMSNormalization": _EPSILON,
    "RNN": _GATES,
    "Selu": {"alpha": "alpha", "gamma": "gamma"},
    "Softmax": {"axis": "dim"},
    "ThresholdedRelu": {"alpha": "threshold"},
}
"""By operator: torch's name for each attribute that it has one for."""

_LEFT_OUT: dict[str, Any] = {"pads": 0, "strides": 1, "dilations": 1, "output_padding": 0}
_BOUNDS = ("min_val", "max_val")
_CALL = re.compile(r"\(args = (.*), kwargs = (\{.*\})\)$")
_TENSOR, _WORD = (
    re.compile(r"%\w+"),
    re.compile(r"(?<![\w.])(?!None\b|True\b|False\b)[A-Za-z_][\w.]*"),
)


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
        found = zip(_BOUNDS, map(number, node.input[1:]), strict=False)
        return {name: value for name, value in found if value is not None}
    names = _NAMES.get(operator)
    if names is None:
        return {}
    attributes = _attributes(node, operator)
    if attributes.get("auto_pad", "NOTSET").startswith("SAME"):
        attributes.pop("pads", None)
    return {
        ours: _in_torch(name, attributes[name], attributes)
        for name, ours in names.items()
        if name in attributes
    }


def settings_of_call(call: str, function: Any) -> dict[str, Any]:
    """Return what an exporter noted that an operator of torch was called with."""
    schema, said = getattr(function, "_schema", None), _CALL.search(call)
    if schema is None or said is None:
        return {}
    try:
        args, kwargs = (
            ast.literal_eval(_WORD.sub(r"'\g<0>'", _TENSOR.sub("None", part)))
            for part in said.groups()
        )
    except (ValueError, SyntaxError):
        return {}
    return of_call(schema, args, kwargs)


def _attributes(node: Any, operator: str) -> dict[str, Any]:
    """Return the attributes of a node, those that it leaves out as its operator defines them."""
    from onnx import defs, helper

    found: dict[str, Any] = {}
    if defs.has(operator):
        declared = defs.get_schema(operator).attributes.values()
        found = {one.name: one.default_value for one in declared if one.default_value.type}
    found |= {one.name: one for one in node.attribute}
    values = {name: _text(helper.get_attribute_value(one)) for name, one in found.items()}
    return _LEFT_OUT | values


def attribute(node: Any, name: str, default: Any = None) -> Any:
    """Return an attribute of a node, or what stands for one that is left out."""
    from onnx import helper

    values = (helper.get_attribute_value(one) for one in node.attribute if one.name == name)
    return next(values, default)


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
