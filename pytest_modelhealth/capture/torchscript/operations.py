"""Reads the operations of a TorchScript graph whose layers were inlined, and names them.

An operation with parameters is named after them where the graph keeps their names and one of
torch's own layers made it, else after what it computes: ``conv2d``, ``conv2d_1``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.deployed.program import Node, Scope
from pytest_modelhealth.capture.torchscript.functions import (
    BUFFERS,
    ParametricLayer,
    function_called,
    function_name,
    parametric_layer,
    recurrent_names,
)
from pytest_modelhealth.capture.torchscript.places import place_of

_CLASS = re.compile(r"\((\w+)\)$")
_LAYER = re.compile(r"\w+\(\w+\)")
_OF_SELF = re.compile(r"^(SELF|UNKNOWN_INSTANCE|INSTANCE_NAME_UNKNOWN)\(")
_IN_LAYERS = re.compile(r"torch/nn/modules/(?!module\.py|container\.py)")
_SUFFIX = re.compile(r"(_fused_\w+)?(_mkldnn)?((?<=[a-z])\.\d+)?$")
"""What an optimisation adds to the name of a parameter that it changes or copies."""
_OF_MKLDNN = "prim::ConstantMKLDNNTensor"
_CONSTANTS = frozenset({"prim::Constant", _OF_MKLDNN})
_HOLD = frozenset({"prim::ListConstruct", "prim::TupleConstruct", "prim::DictConstruct"})
_BRANCHES = frozenset({"prim::If", "prim::Loop"})
_UNSHOWN = _CONSTANTS | _HOLD | {"prim::GetAttr", "prim::Uninitialized"}


@dataclass(eq=False)
class Shown:
    """Tensors that a graph shows at one place.

    Args:
        anchor: the node after which they are shown, or the block at whose begin.
        values: the tensors.
        node: the operation that makes them; ``None`` where they only come by.
        inputs: the tensors that it takes.
        writes: whether it writes to one that it takes.
        written: whether each of the values is written to anywhere.
        begins: whether it begins a call of a layer, rather than going on with one.
    """

    anchor: Any
    values: list[Any]
    node: Node | None = None
    inputs: tuple[str, ...] = ()
    writes: bool = False
    written: tuple[bool, ...] = ()
    begins: bool = True


@dataclass
class Operations:
    """What is read of a graph.

    Args:
        graph: the graph.
        script: the script that it is of.

    Attributes:
        shown: what it can show, in order.
        parameters, buffers: the tensors of layers, by fully qualified names.
        nameless: the layers that are named after what they compute.
        training: the layers that run in training mode.
        written_inputs: whether each input of the graph is written to.
    """

    graph: Any
    script: Any
    shown: list[Shown] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    nameless: list[str] = field(default_factory=list)
    training: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        this = next(iter(self.graph.inputs()))
        self._modules: dict[str, tuple[str, Any]] = {this.debugName(): ("", self.script)}
        self._constants: dict[str, Any] = {}
        self._paths: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self._products: dict[str, Scope] = {}
        self._aliases = self.graph.alias_db()
        nodes = list(_all_nodes(self.graph))
        for node in nodes:
            self._take_constant(node)
        self._uses = Counter(v.debugName() for node in nodes for v in set(node.inputs()))
        self._read(self.graph, [])
        for one in self.shown:
            one.written = tuple(map(self._aliases.has_writers, one.values))
        self.written_inputs = [*map(self._aliases.has_writers, self.graph.inputs())][1:]

    def _take_constant(self, node: Any) -> None:
        """Take down a constant, or an attribute of a module that is known."""
        if node.kind() in _CONSTANTS:
            name = node.output().debugName()
            value = node.t("value") if node.kind() == _OF_MKLDNN else node.output().toIValue()
            path = name.removeprefix("self.") if name.startswith("self.") else ""
            self._constants[name], self._paths[name] = value, _SUFFIX.sub("", path)
        elif node.kind() == "prim::GetAttr" and node.input().debugName() in self._modules:
            path, module = self._modules[node.input().debugName()]
            name, own = node.output().debugName(), node.s("name")
            value = getattr(module, "_c", module).getattr(own)
            full = f"{path}.{own}" if path else own
            if node.output().type().kind() == "ClassType":
                self._modules[name] = full, value
            else:
                self._constants[name], self._paths[name] = value, full

    def _read(self, block: Any, before: Sequence[Any]) -> None:
        """Read the operations of a block; `before` has the tensors that it may write to."""
        visible = [*before, *filter(_is_tensor, block.inputs())]
        if before and (rounds := [value for value in block.inputs() if _is_tensor(value)]):
            self.shown.append(Shown(block, rounds))
        for node in block.nodes():
            made = [value for value in node.outputs() if _is_tensor(value)]
            for inner in node.blocks():
                self._read(inner, visible)
            if node.kind() in _BRANCHES:
                if made:
                    self.shown.append(Shown(node, made))
            elif node.kind() not in _UNSHOWN:
                written = [v for v in _written(node) if _is_tensor(v)]
                made += [
                    value
                    for value in visible
                    if any(self._aliases.may_contain_alias(value, one) for one in written)
                ]
                if made:
                    self.shown.append(self._operation(node, made, bool(written)))
            visible += made

    def _operation(self, node: Any, made: list[Any], writes: bool) -> Shown:
        inputs = list(node.inputs())
        weight = self._constants.get(inputs[1].debugName()) if len(inputs) > 1 else None
        name = function_name(
            node.kind(),
            weight.ndim if isinstance(weight, Tensor) else 0,
            node.kind() == "aten::_convolution"
            and self._constants.get(inputs[6].debugName()) is True,
        )
        layer = parametric_layer(name)
        place = place_of(node)
        scopes: tuple[Scope, ...] = ()
        is_bias = bool(inputs) and inputs[0].debugName() in self._products and self._is_bias(node)
        given = [*inputs, *self._biases(node)] if name == "matmul" else inputs
        if is_bias:
            scopes = (self._products[inputs[0].debugName()],)
        if is_bias or layer is None or not self._has_parameters(layer, given):
            layer = None
        else:
            scopes = (self._scope(node, name, layer, given),)
            if name == "matmul":
                self._products[node.output().debugName()] = scopes[0]
        if layer is not None:
            self._take_parameters(scopes[0].path, layer, name, given)
            if name == "batch_norm" and self._constants.get(inputs[5].debugName()) is True:
                self.training.add(scopes[0].path)
        outputs = tuple(value.debugName() for value in made)
        # the state that a recurrent layer begins with may be one that it makes itself
        first = inputs[:1] if name in ("lstm", "gru") else inputs
        taken = tuple(value.debugName() for value in _tensors_in(first))
        made_of = Node(scopes, function_called(name), (), outputs, place.source)
        return Shown(node, made, made_of, taken, writes, begins=not is_bias)

    def _is_bias(self, node: Any) -> bool:
        """Whether a node adds the bias of a linear layer that an optimisation split."""
        if node.kind() != "aten::add" or place_of(node).mark:
            return False
        return _is_parameter(self._constants.get(list(node.inputs())[1].debugName()))

    def _biases(self, product: Any) -> Iterator[Any]:
        for use in product.output().uses():
            if self._is_bias(use.user):
                yield list(use.user.inputs())[1]

    def _has_parameters(self, layer: ParametricLayer, inputs: Sequence[Any]) -> bool:
        places = layer.tensors or range(len(inputs))
        found = (self._constants.get(inputs[at].debugName()) for at in places if at < len(inputs))
        return any(map(_is_parameter, found))

    def _scope(self, node: Any, name: str, layer: ParametricLayer, inputs: Sequence[Any]) -> Scope:
        """Return the layer that an operation makes up, by the names of what it takes."""
        classes = [
            _CLASS.search(one)
            for one in _LAYER.findall(node.getModuleHierarchy())
            if not _OF_SELF.match(one)
        ]
        kind = getattr(nn, classes[-1][1], None) if classes and classes[-1] else None
        mark = place_of(node).mark
        is_torchs = isinstance(kind, type) if classes else not mark or _IN_LAYERS.search(mark)
        path = self._owner(layer, inputs) if is_torchs else ""
        if not path:
            stem = "linear" if name == "matmul" else name
            number = self._counts[stem]
            self._counts[stem] += 1
            path = f"{stem}_{number}" if number else stem
            self.nameless.append(path)
        found = kind if isinstance(kind, type) else layer.kind
        return Scope(path, f"{found.__module__}.{found.__qualname__}")

    def _owner(self, layer: ParametricLayer, inputs: Sequence[Any]) -> str:
        """Return the layer whose parameters an operation takes, if their names tell.

        Equal parameters of several layers are one constant, with the name of one of them.
        """
        for at, value in enumerate(inputs):
            name = value.debugName()
            owner, _, own = self._paths.get(name, "").rpartition(".")
            constant: Any = self._constants.get(name)
            if not owner or (layer.tensors and layer.tensors.get(at) != own):
                continue
            is_one = self._uses[name] < 2 or not isinstance(constant, Tensor)
            if _is_parameter(constant) and (is_one or not _is_uniform(constant)):
                return owner
        return ""

    def _take_parameters(
        self, path: str, layer: ParametricLayer, name: str, inputs: Sequence[Any]
    ) -> None:
        given = [self._constants.get(value.debugName()) for value in inputs]
        for at, own in layer.tensors.items():
            tensor = given[at] if at < len(given) else None
            if isinstance(tensor, Tensor):
                dense = (tensor if tensor.layout == torch.strided else tensor.to_dense()).detach()
                held = self.buffers if own in BUFFERS else self.parameters
                held.setdefault(f"{path}.{own}", dense.T if name == "matmul" else dense)
        if name in ("lstm", "gru"):
            weights: Any = next(filter(_is_parameter, given))
            for own, part in zip(
                recurrent_names(len(weights), given[4] or 1, given[7] is True),
                weights,
                strict=False,
            ):
                self.parameters.setdefault(f"{path}.{own}", part.detach())


def is_inlined(script: Any) -> bool:
    """Whether the forward of a script holds the code of its layers, rather than calls of them."""
    nodes = list(script.graph.nodes())
    if any(node.kind() == "prim::CallMethod" for node in nodes):
        return False
    found = (one for node in nodes for one in _LAYER.findall(node.getModuleHierarchy()))
    if not all(map(_OF_SELF.match, found)):
        return True
    constants = (node for node in nodes if node.kind() in _CONSTANTS)
    if not any("Tensor" in str(node.output().type()) for node in constants):
        return False
    has_layers = next(script.children(), None) is not None
    return has_layers or next(script.parameters(), None) is None


def _all_nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _all_nodes(inner)


def _is_tensor(value: Any) -> bool:
    return bool(value.type().kind() == "TensorType")


def _is_parameter(constant: Any) -> bool:
    is_list = isinstance(constant, list | tuple) and bool(constant)
    return isinstance(constant[0] if is_list else constant, Tensor)


def _is_uniform(tensor: Tensor) -> bool:
    return tensor.layout != torch.strided or bool((tensor == tensor.flatten()[:1]).all())


def _tensors_in(values: Sequence[Any]) -> Iterator[Any]:
    """Yield the tensors among values, and those that lists among them are made of."""
    for value in values:
        if _is_tensor(value):
            yield value
        elif "Tensor" in str(value.type()) and value.node().kind() not in _BRANCHES:
            yield from _tensors_in(list(value.node().inputs()))


def _written(node: Any) -> Iterator[Any]:
    """Yield what an operation writes to."""
    schema = node.schema()
    if schema.startswith("("):  # those of the language have none
        return
    arguments = torch._C.parse_schema(schema).arguments
    for value, argument in zip(node.inputs(), arguments, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield value
