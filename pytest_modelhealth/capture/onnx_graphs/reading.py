"""Reads an ONNX graph as a program: which of its nodes belong to which layer."""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pytest_modelhealth.capture.observing.source_lines import source_line
from pytest_modelhealth.capture.onnx_graphs.operators import (
    class_of,
    function_of,
    is_activation,
    is_rounding,
)
from pytest_modelhealth.capture.onnx_graphs.quantised import quantised_weights
from pytest_modelhealth.capture.onnx_graphs.values import tensor_of
from pytest_modelhealth.capture.transcript.playing import operator
from pytest_modelhealth.capture.transcript.program import Node, Program, Scope

_SCOPES, _CLASSES, _NODE, _TRACE = (
    f"pkg.torch.onnx.{name}"
    for name in ("name_scopes", "class_hierarchy", "fx_node", "stack_trace")
)
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_UNKNOWN_CLASS = "ONNX"
_TARGET = re.compile(r"\[target=torch\.ops\.([\w.]+)\]")
_ARGUMENT = re.compile(r"%(\w+)")


def program_of(model: Any, folder: Path | None) -> Program:
    """Return the program of an ``onnx.ModelProto``, whose external data lies in a folder.

    The layers are those that `torch.onnx.export` wrote down: in the metadata of each node
    (``dynamo=True``), or in its name (``/encoder/fc1/MatMul``). Where there are neither, each node
    with weights is a layer by its own name.
    """
    graph = model.graph
    nodes = [_Read.of(node) for node in graph.node]
    state = {initializer.name: initializer for initializer in graph.initializer}
    kinds = {info.name: _metadata(info).get(_KIND, "") for info in graph.value_info}
    nodes = _with_scopes(_further_calls(nodes))
    if not any(node.scopes for node in nodes):
        nodes = _named_by_their_nodes(nodes, state)
    paths = {scope.path for node in nodes for scope in node.scopes}
    root = next((node.root for node in nodes if node.root), _UNKNOWN_CLASS)
    names = [name for name in state if _is_of_a_layer(name, paths, kinds)]
    held = {name: tensor_of(state[name], folder) for name in names}
    held |= quantised_weights(
        [(r.node, r.scopes[-1].path) for r in nodes if r.scopes], state, folder
    )
    outputs = tuple(value.name for value in graph.output)
    buffers = {name for name in held if kinds.get(name) == "BUFFER"}
    return Program(
        type_name=root,
        nodes=tuple(_joined(nodes, outputs, _guessed_classes(nodes, state))),
        inputs=tuple(value.name for value in graph.input if value.name not in state),
        outputs=outputs,
        parameters={name: tensor for name, tensor in held.items() if name not in buffers},
        buffers={name: held[name] for name in sorted(buffers)},
    )


_Names = Callable[["_Read"], Iterable[str]]


class _Read(NamedTuple):
    """One node of the graph.

    Args:
        operation: the operation of the exported program that it is a part of; ``""`` where it is
            one by itself.
        scopes: the layers around it, outermost first, without the model.
        root: class of the model.
        target: the operator of `torch.ops` that the operation is.
        arguments: names of what that is called with, in order.
        source: ``path:line`` of the user's code.
        node: the node.
    """

    operation: str
    scopes: tuple[Scope, ...]
    root: str
    target: str
    arguments: tuple[str, ...]
    source: str
    node: Any

    @classmethod
    def of(cls, node: Any) -> _Read:
        known = _metadata(node)
        names, classes = _list(known.get(_SCOPES)), _list(known.get(_CLASSES))
        if not names or len(names) != len(classes):
            return cls("", _scopes_in(node.name), "", "", (), "", node)
        scopes = tuple(map(Scope, names[1:-1], classes[1:-1]))
        _, _, call = known.get(_NODE, "").partition(" = ")
        target = _TARGET.search(call)
        return cls(
            operation=names[-1],
            scopes=scopes,
            root=classes[0],
            target=target[1] if target else "",
            arguments=tuple(_ARGUMENT.findall(call)),
            source=source_line(known.get(_TRACE)),
            node=node,
        )


def _metadata(proto: Any) -> dict[str, str]:
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


def _with_scopes(nodes: list[_Read]) -> list[_Read]:
    """Find the layers of nodes without metadata, which an optimisation or quantisation made.

    What reads a parameter belongs to the parameter's layer, and what gives a value the name of an
    operation is a part of that. What one layer alone reads from belongs to it; anything else lies
    in the innermost layer around all that it stands between. What rounds the output of a layer
    with others in it is that layer's: it may cut values off in the place of an activation. Where
    no node says its layer, an activation is of the model: it may be a layer itself.
    """
    is_said = any(map(_says_scopes, nodes))
    known = {read.operation: read for read in nodes if read.operation}
    paths = {scope.path: scope for read in nodes for scope in read.scopes}
    nodes = [_of_its_parameters(_of_its_operation(read, known), paths) for read in nodes]
    if not is_said:
        nodes = [
            _of_the_model(read) if is_activation(read.node.op_type) else read for read in nodes
        ]
    before = _scopes_around(nodes, lambda read: read.node.input, lambda read: read.node.output)
    after = _scopes_around(nodes[::-1], lambda read: read.node.output, lambda read: read.node.input)
    found = []
    inside = {scopes for read in nodes for scopes in _outer(read.scopes)}
    for read, given, taken in zip(nodes, before, after[::-1], strict=True):
        around = taken if len(set(taken)) == 1 else given + taken
        if is_rounding(read.node.op_type) and len(given) == 1 and given[0] in inside:
            around = given
        found.append(read if _says_scopes(read) else read._replace(scopes=_common(around)))
    return found


def _of_its_operation(read: _Read, known: Mapping[str, _Read]) -> _Read:
    whole = None if _says_scopes(read) else known.get(next(iter(read.node.output), ""))
    return read if whole is None else whole._replace(node=read.node)


def _of_its_parameters(read: _Read, paths: Mapping[str, Scope]) -> _Read:
    owners = dict.fromkeys(name.rpartition(".")[0] for name in read.node.input)
    owner = next(filter(None, owners), "")
    if _says_scopes(read) or not owner:
        return read
    parts = owner.split(".")
    around = (".".join(parts[:end]) for end in range(1, len(parts)))
    scopes = [paths[path] for path in around if path in paths]
    return read._replace(scopes=(*scopes, paths.get(owner, Scope(owner))))


def _outer(scopes: tuple[Scope, ...]) -> Iterator[tuple[Scope, ...]]:
    return (scopes[:end] for end in range(1, len(scopes)))


def _of_the_model(read: _Read) -> _Read:
    return read if _says_scopes(read) else read._replace(root=_UNKNOWN_CLASS)


def _says_scopes(read: _Read) -> bool:
    return bool(read.root or read.scopes or read.node.name.startswith("/"))


def _scopes_around(
    nodes: Iterable[_Read], near: _Names, far: _Names
) -> list[list[tuple[Scope, ...]]]:
    """Return for each node the layers of those on one side of it, through others without any."""
    of_value: dict[str, list[tuple[Scope, ...]]] = defaultdict(list)
    found = []
    for read in nodes:
        around = list(dict.fromkeys(scopes for name in near(read) for scopes in of_value[name]))
        for name in far(read):
            of_value[name] += [read.scopes] if _says_scopes(read) else around
        found.append(around)
    return found


def _common(scopes: Sequence[tuple[Scope, ...]]) -> tuple[Scope, ...]:
    return tuple(
        level[0] for level in takewhile(lambda of: len(set(of)) == 1, zip(*scopes, strict=False))
    )


_FURTHER = re.compile(r"_\d+$")


def _further_calls(nodes: list[_Read]) -> list[_Read]:
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


def _named_by_their_nodes(nodes: Iterable[_Read], state: Mapping[str, Any]) -> list[_Read]:
    """Take each node that has weights for a layer."""
    return [
        read._replace(scopes=(Scope(read.node.name or read.node.output[0]),))
        if any(name in state for name in read.node.input) and class_of([read.node], state)
        else read
        for read in nodes
    ]


def _is_of_a_layer(name: str, paths: set[str], kinds: Mapping[str, str]) -> bool:
    """Whether an initializer is a parameter or buffer, rather than a constant of the graph."""
    return bool(kinds.get(name)) or name.rpartition(".")[0] in paths


def _joined(reads: Sequence[_Read], outputs: Iterable[str], classes: _Classes) -> Iterator[Node]:
    """Yield the operations of the exported program, of which a node may be a part only."""
    readings = Counter(name for read in reads for name in read.node.input)
    readings.update(outputs)
    for _, group in groupby(enumerate(reads), _operation):
        parts = [read for _, read in group]
        first = parts[0]
        given, made = _given(parts), [name for part in parts for name in part.node.output if name]
        inside = Counter(name for part in parts for name in part.node.input)
        used = tuple(name for name in made if readings[name] > inside[name])
        yield Node(
            scopes=tuple(
                s if s.type_name else Scope(s.path, classes.get(s.path, "")) for s in first.scopes
            ),
            function=_function(first),
            inputs=tuple(name for name in given if name not in made),
            outputs=used or tuple(filter(None, parts[-1].node.output)),
            source=first.source,
        )


def _given(parts: Sequence[_Read]) -> list[str]:
    """Return what the nodes of an operation take, in the order of its arguments."""
    order = {name: place for place, name in enumerate(parts[0].arguments)}
    names = dict.fromkeys(name for part in parts for name in part.node.input if name)
    return sorted(names, key=lambda name: order.get(name, len(order)))


def _operation(numbered: tuple[int, _Read]) -> Any:
    """Return what the nodes of one operation have in common, and no others."""
    place, read = numbered
    return (read.scopes, read.operation) if read.operation else place


def _function(read: _Read) -> Callable[..., Any]:
    """Return the function of torch that an operation is, or an operator by the name of the node."""
    found: Any = torch.ops
    for name in read.target.split(".") if read.target else ():
        found = getattr(found, name, None)
    if read.target and callable(found):
        return found  # type: ignore[no-any-return]
    return function_of(read.node.op_type) or operator(read.node.op_type)


_Classes = Mapping[str, str]
"""Classes of layers by their names."""


def _guessed_classes(reads: Iterable[_Read], state: Mapping[str, Any]) -> _Classes:
    """Return the classes of layers that do not say theirs, as far as their nodes show it."""
    own: dict[str, list[Any]] = defaultdict(list)
    for read in reads:
        if read.scopes and not read.scopes[-1].type_name:
            own[read.scopes[-1].path].append(read.node)
    return {path: class_of(nodes, state) for path, nodes in own.items()}
