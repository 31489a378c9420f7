"""The nodes of an ONNX graph, and the layers that they lie in, said or not."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

from pytest_modelhealth.capture.deployed.program import Scope
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


class Read(NamedTuple):
    """One node of the graph.

    Args:
        operation: the operation of the exported program that it is a part of; ``""`` where it is
            one by itself.
        scopes: the layers around it, outermost first, without the model.
        root: class of the model.
        call: the call of an operator of `torch.ops` that the operation is.
        source: ``path:line`` of the user's code.
        node: the node.
    """

    operation: str
    scopes: tuple[Scope, ...]
    root: str
    call: str
    source: str
    node: Any

    @classmethod
    def of(cls, node: Any) -> Read:
        """Return a node of an ``onnx.GraphProto``."""
        known = metadata(node)
        names, classes = _list(known.get(_SCOPES)), _list(known.get(_CLASSES))
        if not names or len(names) != len(classes):
            return cls("", _scopes_in(node.name), "", "", "", node)
        scopes = tuple(map(Scope, names[1:-1], classes[1:-1]))
        _, _, call = known.get(_NODE, "").partition(" = ")
        return cls(
            operation=names[-1],
            scopes=scopes,
            root=classes[0],
            call=call,
            source=source_line(known.get(_TRACE)),
            node=node,
        )

    @property
    def inputs(self) -> Sequence[str]:
        """Names of the values that the node takes."""
        return self.node.input  # type: ignore[no-any-return]

    @property
    def outputs(self) -> Sequence[str]:
        """Names of the values that the node makes."""
        return self.node.output  # type: ignore[no-any-return]

    @property
    def target(self) -> str:
        """The operator of `torch.ops` that the operation is."""
        found = _TARGET.search(self.call)
        return found[1] if found else ""

    @property
    def arguments(self) -> list[str]:
        """The names of what that is called with, in order."""
        return _ARGUMENT.findall(self.call)


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
    if not name.startswith("/"):
        return ()
    path, scopes = "", []
    for part in name.split("/")[1:-1]:
        head, _, rest = part.partition(".")
        repeats = rest and path.rpartition(".")[2] == head
        path = ".".join(filter(None, (path, rest if repeats else part)))
        scopes.append(Scope(path))
    return tuple(scopes)


_Names = Callable[["Read"], Iterable[str]]


def with_scopes(nodes: list[Read], state: Mapping[str, Any]) -> list[Read]:
    """Return nodes with the layers around them; `state` has the initializers by name."""
    found = _with_products(_with_scopes(_further_calls(nodes)), nodes)
    return found if any(node.scopes for node in found) else _named_by_their_nodes(found, state)


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
    is_said = any(map(_says_scopes, nodes))
    known = {read.operation: read for read in nodes if read.operation}
    paths = {scope.path: scope for read in nodes for scope in read.scopes}
    nodes = [_of_its_parameters(_of_its_operation(read, known), paths) for read in nodes]
    if not is_said:
        nodes = [
            _of_the_model(read) if is_activation(read.node.op_type) else read for read in nodes
        ]
    before = _nearest(nodes, lambda read: read.node.input, lambda read: read.node.output)
    after = _nearest(nodes[::-1], lambda read: read.node.output, lambda read: read.node.input)
    found = []
    inside = {scopes for read in nodes for scopes in _outer(read.scopes)}
    for read, given, taken in zip(nodes, before, after[::-1], strict=True):
        if _says_scopes(read):
            found.append(read)
        elif (whole := _one_operation([*given, *taken])) is not None:
            found.append(whole._replace(node=read.node))
        else:
            found.append(read._replace(scopes=_between(read, given, taken, inside)))
    return found


def _one_operation(around: list[Read]) -> Read | None:
    """Return the operation that all of these are parts of, if there is one."""
    parts = {(read.scopes, read.operation) for read in around}
    return around[0] if len(parts) == 1 and around[0].operation else None


def _between(
    read: Read, given: list[Read], taken: list[Read], inside: set[tuple[Scope, ...]]
) -> tuple[Scope, ...]:
    """Return the layers around a node that stands between others."""
    before = list(dict.fromkeys(one.scopes for one in given))
    after = list(dict.fromkeys(one.scopes for one in taken))
    if is_rounding(read.node.op_type) and len(before) == 1:
        return before[0] if before[0] in inside else _common(before + after)
    return _common(after if len(after) == 1 else before + after)


def _with_products(nodes: list[Read], unread: list[Read]) -> list[Read]:
    """Take quantised products whose weights lost their names for layers, by their results' names.

    A product behind a layer with others in it, which alone reads what that gives, may be its last
    step or the next one: such a layer is left out, as nobody knows where it ends.

    Args:
        nodes: the nodes with their layers.
        unread: the same as the file has them.
    """
    chains = list(_nameless_products(unread))
    makers = {name: read for read in nodes for name in read.node.output}
    operations: dict[tuple[Scope, ...], set[str]] = defaultdict(set)
    for read in unread:
        for end in range(len(read.scopes) + 1):
            operations[read.scopes[:end]].add(read.operation)
    found, endless = list(nodes), set[Scope]()
    for chain in chains:
        around, name = nodes[chain[-1]].scopes, unread[chain[-1]].node.output[0]
        if len(operations[around]) == 1:  # a layer of one operation has no product in it
            around = around[:-1]
        path = f"{around[-1].path}.{name}" if around else name
        for place in chain:
            scopes = (*around, Scope(path, _LINEAR))
            found[place] = nodes[place]._replace(scopes=scopes, operation=name)
        rounding = makers.get(nodes[chain[0]].node.input[0])
        given = makers.get(rounding.node.input[0]) if rounding else None
        if given is not None and given.scopes[: len(around)] == around:
            endless.update(given.scopes[len(around) : len(around) + 1])
    inner = {scope for read in found for scope in read.scopes[:-1]}
    left_out = endless & inner
    return [
        read._replace(scopes=tuple(scope for scope in read.scopes if scope not in left_out))
        for read in found
    ]


def _nameless_products(nodes: list[Read]) -> Iterator[list[int]]:
    """Yield the places of the nodes of each product, the last of which gives its result."""
    readers: dict[str, list[int]] = defaultdict(list)
    for at, read in enumerate(nodes):
        for name in read.node.input:
            readers[name].append(at)
    for at, read in enumerate(nodes):
        weight = read.node.input[1] if read.node.op_type == "MatMulInteger" else ""
        if read.scopes or not weight.endswith(VALUES) or "." in weight:
            continue
        chain = [at]
        while (after := readers[nodes[chain[-1]].node.output[0]]) and len(after) == 1:
            if _says_scopes(nodes[after[0]]):
                break
            chain += after
        if not any(nodes[place].target in _PRODUCTS for place in after):  # else that is the sum
            yield chain


_LINEAR = "torch.nn.modules.linear.Linear"
_PRODUCTS = frozenset({"aten.linear.default", "aten.addmm.default"})
"""Operations that multiply with a weight and add a bias."""


def _of_its_operation(read: Read, known: Mapping[str, Read]) -> Read:
    whole = None if _says_scopes(read) else known.get(next(iter(read.node.output), ""))
    return read if whole is None else whole._replace(node=read.node)


def _of_its_parameters(read: Read, paths: Mapping[str, Scope]) -> Read:
    owners = dict.fromkeys(name.rpartition(".")[0] for name in read.node.input)
    owner = next(filter(None, owners), "")
    if _says_scopes(read) or not owner or is_rounding(read.node.op_type):
        return read  # what is rounded for two layers that share a weight has the name of one
    parts = owner.split(".")
    around = (".".join(parts[:end]) for end in range(1, len(parts)))
    scopes = [paths[path] for path in around if path in paths]
    return read._replace(scopes=(*scopes, paths.get(owner, Scope(owner))))


def _outer(scopes: tuple[Scope, ...]) -> Iterator[tuple[Scope, ...]]:
    return (scopes[:end] for end in range(1, len(scopes)))


def _of_the_model(read: Read) -> Read:
    return read if _says_scopes(read) else read._replace(root=UNKNOWN_CLASS)


def _says_scopes(read: Read) -> bool:
    return bool(read.root or read.scopes or read.node.name.startswith("/"))


def _nearest(nodes: Iterable[Read], near: _Names, far: _Names) -> list[list[Read]]:
    """Return for each node those with layers on one side of it, through others without any."""
    of_value: dict[str, list[Read]] = defaultdict(list)
    found = []
    for read in nodes:
        around = {id(other): other for name in near(read) for other in of_value[name]}
        for name in far(read):
            of_value[name] += [read] if _says_scopes(read) else around.values()
        found.append(list(around.values()))
    return found


def _common(scopes: Sequence[tuple[Scope, ...]]) -> tuple[Scope, ...]:
    return tuple(
        level[0] for level in takewhile(lambda of: len(set(of)) == 1, zip(*scopes, strict=False))
    )


_FURTHER = re.compile(r"_\d+$")


def _further_calls(nodes: list[Read]) -> list[Read]:
    """Give further calls of a layer, which are numbered in the names of nodes, the layer's name.

    They read the parameters of the layer.
    """
    further = {}
    for read in nodes:
        path = read.scopes[-1].path if read.scopes else ""
        first = _FURTHER.sub("", path)
        if first != path and any(name.rpartition(".")[0] == first for name in read.node.input):
            further[path] = Scope(first)
    return [
        node._replace(scopes=tuple(further.get(s.path, s) for s in node.scopes)) for node in nodes
    ]


def _named_by_their_nodes(nodes: Iterable[Read], state: Mapping[str, Any]) -> list[Read]:
    """Take each node that has weights for a layer."""
    return [
        read._replace(scopes=(Scope(read.node.name or read.node.output[0]),))
        if any(name in state for name in read.node.input) and class_of([read.node], state)
        else read
        for read in nodes
    ]
