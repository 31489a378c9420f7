"""Reads a TorchScript graph: operations, the values between them, blocks that run conditionally."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pytest_modelhealth.capture.torchscript.places import Place, place_of

_LAYER = re.compile(r"(\w+)\((\w+)\)")
_OF_SELF = frozenset({"SELF", "UNKNOWN_INSTANCE", "INSTANCE_NAME_UNKNOWN"})
_SUFFIX = re.compile(r"(_fused_\w+)?(_mkldnn)?((?<=[a-z])\.\d+)?$")
"""What an optimisation adds to the name of a parameter that it changes or copies."""

_OF_LANGUAGE = frozenset(
    {"prim::TupleConstruct", "prim::ListConstruct", "prim::DictConstruct", "prim::ListUnpack"}
    | {"prim::TupleUnpack", "prim::If", "prim::Loop", "prim::GetAttr"}
)
"""Operators that have no line of their own even where nothing is optimised."""

_UNSET = "prim::Uninitialized"
"""What stands for a value that a branch that raises does not give."""

_OF_MKLDNN = "prim::ConstantMKLDNNTensor"
_CONSTANTS = frozenset({"prim::Constant", _OF_MKLDNN})
_TENSOR = "Tensor"


@dataclass(frozen=True, slots=True)
class Around:
    """A module that TorchScript names in the hierarchy of a node.

    Args:
        name: the attribute of the module around it that it is; of one in a list, its number alone.
        type_name: the name of its class.
    """

    name: str
    type_name: str


@dataclass(frozen=True, slots=True)
class Value:
    """A value of a graph.

    Args:
        name: its name, unique in the graph.
        shown: ``"tensor"`` or ``"tensors"``, a list of them, where it can be shown; ``""`` else.
        holds: whether there are tensors in it.
    """

    name: str
    shown: str
    holds: bool


@dataclass(eq=False, slots=True)
class Operation:
    """A node of a graph.

    Args:
        node: the node.
        kind: its operator.
        around: the modules around it, outermost first.
        scope: the names of modules around it as a trace tells them.
        place: where in the source it came from.
        inputs: what it takes.
        outputs: what it makes.
        blocks: those of a branch or a loop.
        writes: the input that it writes to, if it does.
        views: whether what it makes is a view of its first input.
        made_up: whether an optimisation put it there, and forgot what for.
    """

    node: Any
    kind: str
    around: tuple[Around, ...]
    scope: str
    place: Place
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    blocks: tuple[Block, ...] = ()
    writes: str = ""
    views: bool = False
    made_up: bool = False

    @property
    def matters(self) -> bool:
        """Whether a tensor comes out of it, or is written to in it."""
        made = any(value.holds for value in self.outputs) and self.kind != _UNSET
        return made or bool(self.writes) or any(block.matters for block in self.blocks)


@dataclass(eq=False, slots=True)
class Block:
    """A row of operations: a whole graph, a branch or the body of a loop."""

    inputs: tuple[Value, ...]
    operations: tuple[Operation, ...]
    outputs: tuple[Value, ...]

    @property
    def matters(self) -> bool:
        """Whether a tensor comes out of it, or is written to in it."""
        held = any(value.holds for value in self.outputs)
        return held or any(operation.matters for operation in self.operations)

    def all_operations(self) -> Iterator[Operation]:
        """Yield its operations and those of the blocks in it."""
        for operation in self.operations:
            yield operation
            for block in operation.blocks:
                yield from block.all_operations()


@dataclass(slots=True)
class Graph:
    """What was read of a graph.

    Args:
        body: its operations.
        constants: tensors, and lists of them, by the names of the values that they are.
        paths: the fully qualified names of the parameters that these were, where they are kept.
        plain: numbers, strings and lists of these, by the names of the values that they are.
        uses: how many operations take each constant.
        modules: the modules that are read from others, by the names of the values, with their own.
    """

    body: Block = field(default_factory=lambda: Block((), (), ()))
    constants: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    uses: dict[str, int] = field(default_factory=dict)
    modules: dict[str, tuple[str, Any]] = field(default_factory=dict)

    def may_be_several(self, name: str) -> bool:
        """Whether a constant may be parameters of several layers, which had the same one value."""
        value = self.constants[name]
        if self.uses.get(name, 0) < 2 or not isinstance(value, Tensor):
            return False
        return value.layout != torch.strided or bool((value == value.flatten()[:1]).all())


def read(graph: Any, module: Any) -> Graph:
    """Return what a graph of TorchScript says, without running it.

    Args:
        graph: the graph of a method, with the code of all layers in it.
        module: the module whose method it is.
    """
    found = Graph()
    this = next(iter(graph.inputs()))
    found.modules[this.debugName()] = ("", module)
    found.body = _block(graph, found)
    return found


def is_inlined(script: Any) -> bool:
    """Whether the forward of a script holds the code of its layers, rather than calls of them."""
    nodes = list(script.graph.nodes())
    if any(node.kind() == "prim::CallMethod" for node in nodes):
        return False
    if any(_around(node.getModuleHierarchy()) for node in nodes):
        return True
    constants = (node for node in nodes if node.kind() in _CONSTANTS)
    if not any(_holds(str(node.output().type())) for node in constants):
        return False
    has_layers = next(script.children(), None) is not None
    return has_layers or next(script.parameters(), None) is None


def _block(block: Any, found: Graph) -> Block:
    operations = []
    for node in block.nodes():
        if node.kind() in _CONSTANTS:
            _take_constant(node, found)
        elif node.kind() != "prim::GetAttr" or not _take_attribute(node, found):
            operations.append(_operation(node, found))
    inputs = tuple(map(_value, block.inputs()))
    return Block(inputs, tuple(operations), tuple(map(_value, block.outputs())))


def _take_constant(node: Any, found: Graph) -> None:
    name = node.output().debugName()
    value = node.t("value") if node.kind() == _OF_MKLDNN else node.output().toIValue()
    _take_value(name, value, name.partition("self.")[2] if name.startswith("self.") else "", found)


def _take_value(name: str, value: Any, path: str, found: Graph) -> None:
    parts = value if isinstance(value, list | tuple) and value else [value]
    if all(isinstance(part, Tensor) for part in parts):
        found.constants[name] = value
        found.paths[name] = _SUFFIX.sub("", path)
    else:
        found.plain[name] = value


def _take_attribute(node: Any, found: Graph) -> bool:
    """Take down what an attribute of a module is; return whether that is known."""
    owner = found.modules.get(node.input().debugName())
    if owner is None:
        return False
    path, module = owner
    own, name = node.s("name"), node.output().debugName()
    full = f"{path}.{own}" if path else own
    value = getattr(module, "_c", module).getattr(own)
    if node.output().type().kind() == "ClassType":
        found.modules[name] = (full, value)
    else:
        _take_value(name, value, full, found)
    return True


def _operation(node: Any, found: Graph) -> Operation:
    inputs = tuple(map(_value, node.inputs()))
    for name in {value.name for value in inputs if value.name in found.constants}:
        found.uses[name] = found.uses.get(name, 0) + 1
    operation = Operation(
        node=node,
        kind=node.kind(),
        around=_around(node.getModuleHierarchy()),
        scope=node.scopeName(),
        place=Place(),
        inputs=inputs,
        outputs=tuple(map(_value, node.outputs())),
        blocks=tuple(_block(block, found) for block in node.blocks()),
    )
    _note_aliases(operation)
    if operation.matters:
        operation.place = place_of(node)
        where = operation.around or operation.scope or operation.place.mark
        operation.made_up = not where and node.kind() not in _OF_LANGUAGE
    return operation


def _note_aliases(operation: Operation) -> None:
    schema = operation.node.schema()
    if schema.startswith("("):  # those of the language have none
        return
    parsed = torch._C.parse_schema(schema)
    for value, argument in zip(operation.inputs, parsed.arguments, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            operation.writes = value.name
    operation.views = not operation.writes and any(
        result.alias_info is not None for result in parsed.returns
    )


def _around(hierarchy: str) -> tuple[Around, ...]:
    entries = _LAYER.findall(hierarchy)
    return tuple(Around(name, type_name) for name, type_name in entries if name not in _OF_SELF)


def _value(value: Any) -> Value:
    kind = value.type()
    shown = ""
    if kind.kind() == "TensorType":
        shown = "tensor"
    elif kind.kind() == "ListType" and kind.getElementType().kind() == "TensorType":
        shown = "tensors"
    return Value(value.debugName(), shown, bool(shown) or _holds(str(kind)))


def _holds(kind: str) -> bool:
    """Whether values of a type, in the language's words, hold tensors."""
    return _TENSOR in kind
