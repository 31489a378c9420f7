"""The nodes of an ONNX graph, and the layers that they lie in, said or not."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from pytest_modelhealth.capture.deployed.program import Scope, common_scopes, neighbours
from pytest_modelhealth.capture.observing.operators import source_line
from pytest_modelhealth.capture.onnx_graphs.operators import class_of, is_activation, is_rounding

_SCOPES, _CLASSES, _NODE, _TRACE = (
    f"pkg.torch.onnx.{name}"
    for name in ("name_scopes", "class_hierarchy", "fx_node", "stack_trace")
)
UNKNOWN_CLASS = "ONNX"
VALUES = "_quantized"
"""Ends the name of the integers that onnxruntime's quantiser makes of a weight."""
_TARGET = re.compile(r"\[target=torch\.ops\.([\w.]+)\]")
_ARGUMENT = re.compile(r"%(\w+)")
_FURTHER = re.compile(r"_\d+$")
_LINEAR = "torch.nn.modules.linear.Linear"
_PRODUCTS = frozenset({"aten.linear.default", "aten.addmm.default"})
"""Operations that multiply with a weight and add a bias."""


class Read(NamedTuple):
    """One node of the graph.

    Args:
        node: the node of an ``onnx.GraphProto``.
        operation: the operation of the exported program that it is a part of; ``""`` where it is
            one by itself.
        scopes: the layers around it, outermost first, without the model.
        root: class of the model.
        call: the call of an operator of `torch.ops` that the operation is.
        source: ``path:line`` of the user's code.
    """

    node: Any
    operation: str = ""
    scopes: tuple[Scope, ...] = ()
    root: str = ""
    call: str = ""
    source: str = ""

    @classmethod
    def of(cls, node: Any) -> Read:
        """Return a node, with what its exporter wrote down of it."""
        known = metadata(node)
        names, classes = (_list(known.get(key)) for key in (_SCOPES, _CLASSES))
        if not names or len(names) != len(classes):
            return cls(node, scopes=_scopes_in(node.name))
        scopes = tuple(map(Scope, names[1:-1], classes[1:-1]))
        call = known.get(_NODE, "").partition(" = ")[2]
        return cls(node, names[-1], scopes, classes[0], call, source_line(known.get(_TRACE)))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the values that the node takes."""
        return tuple(self.node.input)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the values that the node makes."""
        return tuple(self.node.output)

    @property
    def target(self) -> str:
        """The operator of `torch.ops` that the operation is."""
        found = _TARGET.search(self.call)
        return found[1] if found else ""

    @property
    def arguments(self) -> list[str]:
        """The names of what that is called with, in order."""
        return _ARGUMENT.findall(self.call)

    @property
    def says_scopes(self) -> bool:
        """Whether the layers around it are known."""
        return bool(self.root or self.scopes or self.node.name.startswith("/"))


def metadata(proto: Any) -> dict[str, str]:
    """Return what an exporter wrote down of a part of a file."""
    return {entry.key: entry.value for entry in proto.metadata_props}


def _list(text: str | None) -> list[str]:
    """Return the words of a list that was written down; none where it is something else."""
    try:
        words = ast.literal_eval(text or "[]")
    except (ValueError, SyntaxError):
        return []
    is_list = isinstance(words, list) and all(isinstance(word, str) for word in words)
    return words if is_list else []


def _scopes_in(name: str) -> tuple[Scope, ...]:
    """Return the layers in the name of a node, as ``/layers/layers.0/fc/MatMul`` has them."""
    path, scopes = "", []
    for part in name.split("/")[1:-1] if name.startswith("/") else ():
        head, _, rest = part.partition(".")
        repeats = rest and path.rpartition(".")[2] == head
        path = ".".join(filter(None, (path, rest if repeats else part)))
        scopes.append(Scope(path))
    return tuple(scopes)


def with_scopes(nodes: list[Read], state: Mapping[str, Any]) -> list[Read]:
    """Return nodes with the layers around them; `state` has the initializers by name."""
    found = _with_products(_with_scopes(_further_calls(nodes)), nodes)
    if any(read.scopes for read in found):
        return found
    return [  # no name tells of layers: each node that has weights is one
        read._replace(scopes=(Scope(read.node.name or read.outputs[0]),))
        if any(name in state for name in read.inputs) and class_of([read.node], state)
        else read
        for read in found
    ]


def _with_scopes(nodes: list[Read]) -> list[Read]:
    """Find the layers of nodes without metadata, which an optimisation or quantisation made.

    What reads a parameter belongs to the parameter's layer, and what gives a value the name of an
    operation is a part of that, and so is what stands between parts of one operation. What one
    layer alone reads from belongs to it; anything else lies in the innermost layer around all that
    it stands between. What rounds the output of a layer with others in it is that layer's: it may
    cut values off in the place of an activation; of any other layer it is neither that layer's nor
    the next one's. Where no node says its layer, an activation is of the model: it may be a layer
    itself.
    """
    is_said = any(read.says_scopes for read in nodes)
    known = {read.operation: read for read in nodes if read.operation}
    paths = {scope.path: scope for read in nodes for scope in read.scopes}
    nodes = [
        read
        if read.says_scopes
        else known.get(next(iter(read.outputs), ""), read)._replace(node=read.node)
        for read in nodes
    ]
    nodes = [_of_its_parameters(read, paths) for read in nodes]
    if not is_said:
        nodes = [
            read._replace(root=UNKNOWN_CLASS)
            if is_activation(read.node.op_type) and not read.says_scopes
            else read
            for read in nodes
        ]
    inside = {read.scopes[:end] for read in nodes for end in range(1, len(read.scopes))}
    around = neighbours(
        nodes, lambda read: read.inputs, lambda read: read.outputs, lambda read: read.says_scopes
    )
    return [
        read if read.says_scopes else _between(read, given, taken, inside)
        for read, (given, taken) in zip(nodes, around, strict=True)
    ]


def _between(
    read: Read, given: list[Read], taken: list[Read], inside: set[tuple[Scope, ...]]
) -> Read:
    """Return a node with the layers around it, which stands between others."""
    parts = {(one.scopes, one.operation): one for one in (*given, *taken)}
    if len(parts) == 1 and (whole := next(iter(parts.values()))).operation:
        return whole._replace(node=read.node)
    before = list(dict.fromkeys(one.scopes for one in given))
    after = list(dict.fromkeys(one.scopes for one in taken))
    if is_rounding(read.node.op_type) and len(before) == 1 and before[0] in inside:
        return read._replace(scopes=before[0])
    is_of_next = len(after) == 1 and not (is_rounding(read.node.op_type) and len(before) == 1)
    return read._replace(scopes=common_scopes(after if is_of_next else before + after))


def _of_its_parameters(read: Read, paths: Mapping[str, Scope]) -> Read:
    owners = (name.rpartition(".")[0] for name in read.inputs)
    owner = next(filter(None, owners), "")
    if read.says_scopes or not owner or is_rounding(read.node.op_type):
        return read  # what is rounded for two layers that share a weight has the name of one
    parts = owner.split(".")
    around = (".".join(parts[:end]) for end in range(1, len(parts)))
    scopes = [paths[path] for path in around if path in paths]
    return read._replace(scopes=(*scopes, paths.get(owner, Scope(owner))))


def _with_products(nodes: list[Read], unread: list[Read]) -> list[Read]:
    """Take quantised products whose weights lost their names for layers, by their results' names.

    A product behind a layer with others in it, which alone reads what that gives, may be its last
    step or the next one: such a layer is left out, as nobody knows where it ends.

    Args:
        nodes: the nodes with their layers.
        unread: the same as the file has them.
    """
    chains = list(_nameless_products(unread))
    makers = {name: read for read in nodes for name in read.outputs}
    operations: dict[tuple[Scope, ...], set[str]] = defaultdict(set)
    for read in unread:
        for end in range(len(read.scopes) + 1):
            operations[read.scopes[:end]].add(read.operation)
    found, endless = list(nodes), set[Scope]()
    for chain in chains:
        around, name = nodes[chain[-1]].scopes, unread[chain[-1]].outputs[0]
        if len(operations[around]) == 1:  # a layer of one operation has no product in it
            around = around[:-1]
        path = f"{around[-1].path}.{name}" if around else name
        for place in chain:
            scopes = (*around, Scope(path, _LINEAR))
            found[place] = nodes[place]._replace(scopes=scopes, operation=name)
        rounding = makers.get(nodes[chain[0]].inputs[0])
        given = makers.get(rounding.inputs[0]) if rounding else None
        if given is not None and given.scopes[: len(around)] == around:
            endless.update(given.scopes[len(around) : len(around) + 1])
    left_out = endless & {scope for read in found for scope in read.scopes[:-1]}
    return [
        read._replace(scopes=tuple(scope for scope in read.scopes if scope not in left_out))
        for read in found
    ]


def _nameless_products(nodes: list[Read]) -> Iterator[list[int]]:
    """Yield the places of the nodes of each product, the last of which gives its result."""
    readers: dict[str, list[int]] = defaultdict(list)
    for at, read in enumerate(nodes):
        for name in read.inputs:
            readers[name].append(at)
    for at, read in enumerate(nodes):
        weight = read.inputs[1] if read.node.op_type == "MatMulInteger" else ""
        if read.scopes or not weight.endswith(VALUES) or "." in weight:
            continue
        chain = [at]
        while (after := readers[nodes[chain[-1]].outputs[0]]) and len(after) == 1:
            if nodes[after[0]].says_scopes:
                break
            chain += after
        if not any(nodes[place].target in _PRODUCTS for place in after):  # else that is the sum
            yield chain


def _further_calls(nodes: list[Read]) -> list[Read]:
    """Give further calls of a layer, which are numbered in the names of nodes, the layer's name.

    They read the parameters of the layer.
    """
    further = {}
    for read in nodes:
        path = read.scopes[-1].path if read.scopes else ""
        first = _FURTHER.sub("", path)
        if first != path and any(name.rpartition(".")[0] == first for name in read.inputs):
            further[path] = Scope(first)
    return [
        read._replace(scopes=tuple(further.get(one.path, one) for one in read.scopes))
        for read in nodes
    ]
