"""Reads the operations of a TorchScript graph whose layers were inlined.

Each is named after what it computes, in the order of the graph: ``conv2d``, ``conv2d_1``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.deployed.program import Node, Scope, activation_called, operator
from pytest_modelhealth.layers import FUNCTIONAL_LAYERS

_OF_MKLDNN = "prim::ConstantMKLDNNTensor"
_CONSTANTS = frozenset({"prim::Constant", _OF_MKLDNN})
_BRANCHES = frozenset({"prim::If", "prim::Loop"})
_UNSHOWN = _CONSTANTS | _BRANCHES | {
    "prim::ListConstruct", "prim::TupleConstruct", "prim::DictConstruct", "prim::GetAttr",
    "prim::Uninitialized",
}  # fmt: skip

_AFTER_INPUT = {1: "weight", 2: "bias"}
_OF_NORM = {**_AFTER_INPUT, 3: "running_mean", 4: "running_var"}
_LAYERS: Mapping[str, tuple[type[nn.Module], Mapping[int, str]]] = {
    "linear": (nn.Linear, _AFTER_INPUT),
    "matmul": (nn.Linear, _AFTER_INPUT),
    "bilinear": (nn.Bilinear, {2: "weight", 3: "bias"}),
    "conv1d": (nn.Conv1d, _AFTER_INPUT),
    "conv2d": (nn.Conv2d, _AFTER_INPUT),
    "conv3d": (nn.Conv3d, _AFTER_INPUT),
    "conv_transpose1d": (nn.ConvTranspose1d, _AFTER_INPUT),
    "conv_transpose2d": (nn.ConvTranspose2d, _AFTER_INPUT),
    "conv_transpose3d": (nn.ConvTranspose3d, _AFTER_INPUT),
    "batch_norm": (nn.BatchNorm1d, _OF_NORM),
    "instance_norm": (nn.InstanceNorm1d, _OF_NORM),
    "layer_norm": (nn.LayerNorm, {2: "weight", 3: "bias"}),
    "rms_norm": (nn.RMSNorm, {2: "weight"}),
    "group_norm": (nn.GroupNorm, {2: "weight", 3: "bias"}),
    "embedding": (nn.Embedding, {0: "weight"}),
    "embedding_bag": (nn.EmbeddingBag, {0: "weight"}),
    "prelu": (nn.PReLU, {1: "weight"}),
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
}
"""Functions that are a layer by themselves: its class, and which of their inputs are what in it."""
_TAKES_MORE = frozenset({"prelu", "threshold"})
"""Functional layers that cannot be called with their input alone."""


@cache
def _function_called(name: str) -> Any:
    """Return the functional layer of this name, or an operator where the function is none."""
    function = None if name in _TAKES_MORE else activation_called(name)
    return function if function in FUNCTIONAL_LAYERS else operator(name)


@dataclass(frozen=True)
class Shown:
    """An operation that a graph shows.

    Args:
        anchor: its node in the graph.
        inputs: the tensors that it takes.
        outputs: the tensors that it returns.
        node: what it computes.
        writes: whether it writes to a tensor that it takes.
        begins: whether it begins a call of a layer, rather than going on with one.
    """

    anchor: Any
    inputs: list[Any]
    outputs: list[Any]
    node: Node
    writes: bool
    begins: bool


@dataclass
class Operations:
    """What is read of a graph.

    Args:
        graph: the graph.
        script: the script that it is of.

    Attributes:
        shown: what it can show, in order.
        parameters, buffers: the tensors of layers, by fully qualified names.
        training: the layers that run in training mode.
    """

    graph: Any
    script: Any
    shown: list[Shown] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    training: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        this = next(iter(self.graph.inputs()))
        self._constants: dict[str, Any] = {this.debugName(): self.script}
        self._counts: Counter[str] = Counter()
        self._products: dict[str, Scope] = {}
        self._read(self.graph)

    def _read(self, block: Any) -> None:
        """Read the operations of a block, and what it and its modules hold."""
        for node in block.nodes():
            if node.kind() in _CONSTANTS:
                is_dense = node.kind() != _OF_MKLDNN
                value = node.output().toIValue() if is_dense else node.t("value")
                self._constants[node.output().debugName()] = value
            elif node.kind() == "prim::GetAttr" and node.input().debugName() in self._constants:
                owner = self._constants[node.input().debugName()]
                held = getattr(owner, "_c", owner).getattr(node.s("name"))
                self._constants[node.output().debugName()] = held
            for inner in node.blocks():
                self._read(inner)
            if node.kind() not in _UNSHOWN and any(map(_is_tensor, node.outputs())):
                self._operation(node)

    def _constant(self, inputs: Sequence[Any], place: int) -> Any:
        return self._constants.get(inputs[place].debugName()) if place < len(inputs) else None

    def _operation(self, node: Any) -> None:
        inputs = list(node.inputs())
        name = self._function_name(node.kind(), inputs)
        scope = self._products.get(inputs[0].debugName()) if inputs else None
        is_bias = scope is not None and self._is_bias(node)
        if not is_bias:
            biases = (use.user for use in node.output().uses()) if name == "matmul" else ()
            given = [*inputs, *(list(one.inputs())[1] for one in biases if self._is_bias(one))]
            scope = self._layer(name, given)
        if name == "matmul" and scope is not None:
            self._products[node.output().debugName()] = scope
        # the state that a recurrent layer begins with may be one that it makes itself
        taken = [
            value
            for value in _tensors_in(inputs[:1] if name in ("lstm", "gru") else inputs)
            if value.debugName() not in self._constants
        ]
        made = list(filter(_is_tensor, node.outputs()))
        function = Node((scope,) if scope else (), _function_called(name), (), ())
        self.shown.append(Shown(node, taken, made, function, _writes(node), not is_bias))

    def _function_name(self, kind: str, inputs: Sequence[Any]) -> str:
        """Return the name of the function that an operator computes: `relu` for ``aten::relu_``."""
        name = kind.partition("::")[2]
        if name not in ("_convolution", "mkldnn_convolution", "convolution"):
            return name if name.startswith("__") else name.rstrip("_")
        weight = self._constant(inputs, 1)
        is_transposed = name == "_convolution" and self._constant(inputs, 6) is True
        stem = "conv_transpose" if is_transposed else "conv"
        is_known = isinstance(weight, Tensor) and weight.ndim > 2
        return f"{stem}{weight.ndim - 2}d" if is_known else name

    def _is_bias(self, node: Any) -> bool:
        """Whether a node adds the bias of a linear layer that an optimisation split."""
        if node.kind() != "aten::add" or node.sourceRange():
            return False
        return _is_parameter(self._constant(list(node.inputs()), 1))

    def _layer(self, name: str, inputs: Sequence[Any]) -> Scope | None:
        """Return the layer that an operation is by itself, and take down its parameters."""
        kind, places = _LAYERS.get(name, (None, {}))
        held = [self._constant(inputs, place) for place in range(len(inputs))]
        taken = [held[place] for place in places if place < len(held)] if places else held
        if kind is None or not any(map(_is_parameter, taken)):
            return None
        stem = "linear" if name == "matmul" else name
        path = f"{stem}_{self._counts[stem]}" if self._counts[stem] else stem
        self._counts[stem] += 1
        for place, own in places.items():
            tensor = held[place] if place < len(held) else None
            if isinstance(tensor, Tensor):
                dense = (tensor if tensor.layout == torch.strided else tensor.to_dense()).detach()
                of = self.buffers if own.startswith("running_") else self.parameters
                of[f"{path}.{own}"] = dense.T if name == "matmul" else dense
        if not places:
            weights: Any = next(filter(_is_parameter, held))
            names = _recurrent_names(kind, len(weights), held[4] or 1, held[7] is True)
            for own, part in zip(names, weights, strict=False):
                self.parameters[f"{path}.{own}"] = part.detach()
        if name == "batch_norm" and held[5] is True:
            self.training.add(path)
        return Scope(path, f"{kind.__module__}.{kind.__qualname__}")


def _recurrent_names(kind: Any, count: int, layers: int, both_ways: bool) -> list[str]:
    """Return the names of the parameters of an LSTM or GRU in the order of its operator."""
    each = count // (layers * (1 + both_ways))
    options = {"proj_size": 1} if each % 2 else {}
    options |= {"bias": each > 3, "bidirectional": both_ways}
    names: list[str] = kind(2, 2, layers, **options, device="meta")._flat_weights_names
    return names


def is_inlined(script: Any) -> bool:
    """Whether the forward of a script holds the code of its layers, rather than calls of them."""
    text = str(script.graph)
    if "prim::CallMethod" in text:
        return False
    has_layers = next(script.children(), None) is not None
    has_constants = "value=<Tensor>" in text or _OF_MKLDNN in text
    return has_layers or (has_constants and next(script.parameters(), None) is None)


def _is_tensor(value: Any) -> bool:
    return bool(value.type().kind() == "TensorType")


def _is_parameter(constant: Any) -> bool:
    is_list = isinstance(constant, list | tuple) and bool(constant)
    return isinstance(constant[0] if is_list else constant, Tensor)


def _tensors_in(values: Sequence[Any]) -> Iterator[Any]:
    """Yield the tensors among values, and those that lists among them are made of."""
    for value in values:
        if _is_tensor(value):
            yield value
        elif "Tensor" in str(value.type()) and value.node().kind() not in _BRANCHES:
            yield from _tensors_in(list(value.node().inputs()))


def _writes(node: Any) -> bool:
    """Whether an operation writes to what it takes; those of the language have no schema."""
    schema = node.schema()
    if schema.startswith("("):
        return False
    aliases = (one.alias_info for one in torch._C.parse_schema(schema).arguments)
    return any(alias is not None and alias.is_write for alias in aliases)
