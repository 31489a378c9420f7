"""Reads an ONNX graph as a program: its operations, of which a node may be a part only."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from pytest_modelhealth.capture.deployed.program import Node, Program, Scope, in_order, operator
from pytest_modelhealth.capture.graph_settings import merged
from pytest_modelhealth.capture.onnx_graphs.nodes import UNKNOWN_CLASS, Read, metadata, with_scopes
from pytest_modelhealth.capture.onnx_graphs.operators import (
    class_of,
    function_of,
    is_rounding,
    settings_of,
)
from pytest_modelhealth.capture.onnx_graphs.weights import Constants, tensor_of, weights_of_layers

_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"


def program_of(model: Any, folder: Path | None) -> Program:
    """Return the program of an ``onnx.ModelProto``, whose external data lies in a folder.

    The layers are those that `torch.onnx.export` wrote down: in the metadata of each node
    (``dynamo=True``), or in its name (``/encoder/fc1/MatMul``). Where there are neither, each node
    with weights is a layer by its own name.
    """
    graph = model.graph
    state = {initializer.name: initializer for initializer in graph.initializer}
    nodes = with_scopes([Read.of(node) for node in graph.node], state)
    kinds = {info.name: metadata(info).get(_KIND, "") for info in graph.value_info}
    paths = {scope.path for node in nodes for scope in node.scopes}
    root = next((node.root for node in nodes if node.root), UNKNOWN_CLASS)
    held = {  # any other initializer is a constant of the graph
        name: tensor_of(one, folder)
        for name, one in state.items()
        if kinds.get(name) or name.rpartition(".")[0] in paths
    }
    constants = Constants([read.node for read in nodes], state, folder)
    held |= weights_of_layers(nodes, constants)
    outputs = tuple(value.name for value in graph.output)
    buffers = {name for name in held if kinds.get(name) == "BUFFER"}
    return Program(
        type_name=root,
        nodes=tuple(_joined(nodes, outputs, state, constants)),
        inputs=tuple(value.name for value in graph.input if value.name not in state),
        outputs=outputs,
        parameters={name: tensor for name, tensor in held.items() if name not in buffers},
        buffers={name: held[name] for name in sorted(buffers)},
    )


def _joined(
    reads: Sequence[Read], outputs: Iterable[str], state: Mapping[str, Any], constants: Constants
) -> Iterator[Node]:
    """Yield the operations of the exported program, of which a node may be a part only.

    Args:
        reads: the nodes.
        outputs: names of what the model returns.
        state: the initializers by name.
        constants: what stands in the graph.
    """
    unsaid: dict[str, list[Any]] = defaultdict(list)
    for read in reads:
        if read.scopes and not read.scopes[-1].type_name:
            unsaid[read.scopes[-1].path].append(read.node)
    classes = {path: class_of(nodes, state) for path, nodes in unsaid.items()}
    readings = Counter(name for read in reads for name in read.inputs)
    readings.update(outputs)
    values = _Values(reads)
    for parts in _operations(reads):
        first = next((part for part in parts if not is_rounding(part.node.op_type)), parts[0])
        made = [name for part in parts for name in part.outputs if name]
        inside = Counter(name for part in parts for name in part.inputs)
        used = tuple(name for name in made if readings[name] > inside[name])
        function = _function(first)
        attributes = merged(settings_of(part.node, constants.number) for part in parts)
        yield Node(
            scopes=tuple(
                s if s.type_name else Scope(s.path, classes.get(s.path, "")) for s in first.scopes
            ),
            function=function,
            inputs=tuple(values.given(parts)),
            outputs=used or tuple(filter(None, parts[-1].outputs)),
            source=first.source,
            settings=attributes,
        )


class _Values:
    """The values that the nodes of a graph give to each other, by name."""

    def __init__(self, reads: Iterable[Read]) -> None:
        self._computed: dict[str, int] = {}
        self._rounded: dict[str, str] = {}  # what each was before it was brought to eight bits
        self._whole: dict[
            str, str
        ] = {}  # what integers and the scale that the batch decides are of
        for at, read in enumerate(reads):
            self._computed.update(dict.fromkeys(read.outputs, at))
            if is_rounding(read.node.op_type):
                self._rounded[read.outputs[0]] = self._before(read.inputs[0])
            elif read.node.op_type == "DynamicQuantizeLinear":
                self._whole.update(dict.fromkeys(read.outputs, read.inputs[0]))

    def _before(self, name: str) -> str:
        return self._rounded.get(name, name)

    def given(self, parts: Sequence[Read]) -> list[str]:
        """Return what the nodes of an operation take, in the order of its arguments."""
        made = {name for part in parts for name in part.outputs}
        taken = dict.fromkeys(name for part in parts for name in part.inputs if name)
        names = dict.fromkeys(self._whole.get(name, name) for name in taken if name not in made)
        places = {name: place for place, name in enumerate(parts[0].arguments)}
        known = {name: places.get(self._before(name)) for name in names}
        # values that an optimisation gave other names stand where arguments are missing
        unknown = [name for name in known if self._before(name) in self._computed]
        unknown = [name for name in unknown if known[name] is None]
        unknown.sort(key=lambda name: self._computed[self._before(name)])
        missing = sorted(set(places.values()).difference(known.values()))
        known.update(zip(unknown, missing, strict=False))
        return sorted(names, key=lambda name: (known[name] is None, known[name]))


def _operations(reads: Sequence[Read]) -> Iterable[Sequence[Read]]:
    """Return the parts of each operation together, which a quantiser sorts among others.

    Where they cannot run together, those are that stand together.
    """
    keys = [
        (read.scopes, read.operation) if read.operation else at for at, read in enumerate(reads)
    ]
    whole: dict[Any, list[Read]] = defaultdict(list)
    for key, read in zip(keys, reads, strict=True):
        whole[key].append(read)
    places = {key: at for at, key in reversed(list(enumerate(keys)))}
    ordered = in_order(list(whole.values()), [places[key] for key in whole])
    if ordered is not None:
        return ordered
    runs = groupby(range(len(reads)), keys.__getitem__)
    return [[reads[at] for at in run] for _, run in runs]


def _function(read: Read) -> Callable[..., Any]:
    """Return the function of torch that an operation is, or an operator by the name of the node."""
    found: Any = torch.ops
    for name in read.target.split(".") if read.target else ():
        found = getattr(found, name, None)
    if read.target and callable(found):
        return found  # type: ignore[no-any-return]
    return function_of(read.node.op_type) or operator(read.node.op_type)
