"""Reads an ONNX graph as a program, by what torch's exporter over `torch.export` wrote down in it.

Each node has the layers around it and the operation of the exported program that it is a part of
(``pkg.torch.onnx.*``). Where no node has that, each is shown by its own name.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pytest_modelhealth.capture.deployed.program import Operation, Program, Scope
from pytest_modelhealth.capture.observing.graphs import source_line
from pytest_modelhealth.statistics.dense import quantised

_SCOPES, _CLASSES, _TRACE = (
    f"pkg.torch.onnx.{name}" for name in ("name_scopes", "class_hierarchy", "stack_trace")
)
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_NOTE = (
    "layers are seen in a run of onnxruntime that gives out each value, the outputs in one that "
    "may fuse operations"
)
_NO_METADATA = (
    "the file does not say which layers its nodes are of, as torch.onnx.export(dynamo=True) does, "
    "and each node is shown by its own name"
)
_ROUNDING = frozenset({"QuantizeLinear", "DequantizeLinear"})
_OF_INTEGERS = frozenset(
    {*_ROUNDING, "DynamicQuantizeLinear", "MatMulInteger", "ConvInteger", "QLinearMatMul"}
    | {"QLinearConv", "QGemm"}
)
"""Operators that a quantised model has."""

_BY_BITS = {
    name: (bits, getattr(torch, name))
    for name, bits in (("bfloat16", "int16"), ("float8_e4m3fn", "int8"), ("float8_e5m2", "int8"))
}
"""Dtypes that NumPy has from another library, and those it has itself of the same width."""


def from_array(array: Any) -> Tensor:
    """Return a copy of an array.

    Raises:
        TypeError: torch has no such dtype.
    """
    if array.dtype.name in _BY_BITS:
        bits, dtype = _BY_BITS[array.dtype.name]
        return torch.from_numpy(array.view(bits).copy()).view(dtype)
    return torch.from_numpy(array.copy())


def program_of(model: Any, folder: Path | None) -> Program:
    """Return the program of an ``onnx.ModelProto``, whose external data lies in a folder."""
    graph = model.graph
    outputs = [value.name for value in graph.output]
    said = [_Said.of(node) for node in graph.node]
    root = next((one.root for one in said if one.root), "")
    said = list(_with_owners(graph, said)) if root else said
    parts: dict[Any, list[Any]] = defaultdict(list)  # nodes by the operation that they are part of
    for at, (node, one) in enumerate(zip(graph.node, said, strict=True)):
        parts[(one.scopes, one.operation or at, one.target)].append((at, node))
    whole: dict[str, str] = {}  # what each rounded value was before: that is no end of an operation
    for node in graph.node:
        if node.op_type in _ROUNDING:
            whole |= dict.fromkeys(node.output, whole.get(node.input[0], node.input[0]))
    readings = Counter(
        whole.get(name, name)
        for node in graph.node
        for name in (() if node.op_type in _ROUNDING else node.input)
    )
    readings.update(whole.get(name, name) for name in outputs)
    operations = []
    for (scopes, _, target), nodes in sorted(parts.items(), key=lambda item: item[1][-1][0]):
        taken = [name for _, node in nodes for name in node.input if name]
        inside = Counter(whole.get(name, name) for name in taken)
        made = [name for _, node in nodes for name in node.output if name]
        used = tuple(name for name in made if readings[name] > inside[name])
        first = nodes[0][1]
        if not (root or taken):
            continue  # a constant
        operation = Operation(
            name=re.sub(r"^aten\._?(\w+?)_?(\.\w+)?$", r"\1", target),
            scopes=scopes if root else (Scope((first.name or made[0]).replace(".", "_"), target),),
            inputs=tuple(n for n in dict.fromkeys(taken) if whole.get(n, n) not in made),
            outputs=used or tuple(made[-1:]),
            rounds=first.op_type in _ROUNDING,
            source=source_line(_metadata(first).get(_TRACE)),
        )
        operations.append(operation)
    kinds = {info.name: _metadata(info).get(_KIND, "") for info in graph.value_info}
    paths = {scope.path for one in operations for scope in one.scopes or ()}
    state = dict(_state(graph, folder, paths, kinds)) if root else {}
    buffers = {name for name in state if kinds.get(name) == "BUFFER"}
    return Program(
        type_name=root or "ONNX",
        operations=operations,
        parameters={name: tensor for name, tensor in state.items() if name not in buffers},
        buffers={name: state[name] for name in sorted(buffers)},
        rounds=any(node.op_type in _OF_INTEGERS for node in graph.node),
        names_layers=bool(root),
        note=_NOTE if root else f"{_NOTE}; {_NO_METADATA}",
    )


class _Said(NamedTuple):
    """What is known of a node: the layers around it, and the operation that it is a part of."""

    scopes: tuple[Scope, ...] | None
    operation: str
    target: str
    root: str

    @classmethod
    def of(cls, node: Any) -> _Said:
        """Return what the exporter wrote down of a node: lists of words."""
        lists = []
        for key in (_SCOPES, _CLASSES):
            try:
                words = ast.literal_eval(_metadata(node).get(key, "[]"))
            except (ValueError, SyntaxError):
                words = []
            is_list = isinstance(words, list) and all(isinstance(word, str) for word in words)
            lists.append(words if is_list else [])
        names, classes = lists
        if not names or len(names) != len(classes):
            return cls(None, "", node.op_type, "")
        return cls(
            tuple(map(Scope, names[1:-1], classes[1:-1])), names[-1], classes[-1], classes[0]
        )


def _with_owners(graph: Any, said: list[_Said]) -> Iterator[_Said]:
    """Yield what is said of nodes; those that a quantiser made are of the layer whose weight one
    reads, and so is what is made of that alone.
    """
    known = {scope.path: scope for one in said for scope in one.scopes or ()}
    stored = {one.name for one in graph.initializer}
    owners: dict[str, tuple[Scope, ...]] = {}
    for node, one in zip(graph.node, said, strict=True):
        names = {name.rpartition(".")[0] for name in node.input if name in stored} - {""}
        found = {owners[name] for name in node.input if name in owners}
        if one.scopes is None and node.op_type not in _ROUNDING | {"DynamicQuantizeLinear"}:
            if len(names) == 1:
                parts = next(iter(names)).split(".")
                around = (".".join(parts[:end]) for end in range(1, len(parts)))
                own = Scope(".".join(parts))
                scopes = (*(known[path] for path in around if path in known), own)
                found = {(*scopes[:-1], known.get(own.path, own))}
            if len(found) == 1:
                one = one._replace(scopes=found.pop())
                owners |= dict.fromkeys(node.output, one.scopes or ())
        yield one


def _metadata(proto: Any) -> dict[str, str]:
    """Return what an exporter wrote down of a part of a file."""
    return {entry.key: entry.value for entry in proto.metadata_props}


def _state(
    graph: Any, folder: Path | None, paths: set[str], kinds: Mapping[str, str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers that have their names still, rounded ones too."""
    from onnx import numpy_helper

    stored = {one.name: one for one in graph.initializer}

    def read(name: str) -> Tensor:
        array = numpy_helper.to_array(stored[name], base_dir=str(folder or ""))
        return from_array(array)

    for name in stored:
        own = name.removesuffix("_quantized").removesuffix("_Transposed")
        owner = own.rpartition(".")[0]
        if owner not in paths and (owner or not kinds.get(name)):
            continue  # a constant of the graph, or of a layer that is gone
        try:
            if own == name:
                yield name, read(name)
            elif name.endswith("_quantized"):
                stem, values = name.removesuffix("_quantized"), read(name)
                scale, zero = read(f"{stem}_scale"), read(f"{stem}_zero_point")
                if scale.numel() == 1:
                    is_turned = stem.endswith("_Transposed")
                    values = values.t().contiguous() if is_turned else values
                    yield own, quantised(values, scale, int(zero))
        except (KeyError, TypeError, RuntimeError):  # torch has no such dtype, or quantises none
            continue
