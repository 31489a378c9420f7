"""Reads an ONNX graph as a program: which of its nodes belong to which layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from pytest_modelhealth.capture.onnx_graphs.joining import Classes, joined
from pytest_modelhealth.capture.onnx_graphs.nodes import UNKNOWN_CLASS, Read, metadata
from pytest_modelhealth.capture.onnx_graphs.operators import class_of
from pytest_modelhealth.capture.onnx_graphs.quantised import quantised_weights
from pytest_modelhealth.capture.onnx_graphs.scopes import with_scopes
from pytest_modelhealth.capture.onnx_graphs.values import tensor_of
from pytest_modelhealth.capture.onnx_graphs.weights import Constants, weights_of_layers
from pytest_modelhealth.capture.deployed.program import Program

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
    names = [name for name in state if _is_of_a_layer(name, paths, kinds)]
    held = {name: tensor_of(state[name], folder) for name in names}
    held |= quantised_weights(
        [(r.node, r.scopes[-1].path) for r in nodes if r.scopes], state, folder
    )
    constants = Constants([read.node for read in nodes], state, folder)
    held |= weights_of_layers(nodes, constants)
    held |= _shared(nodes, held)
    outputs = tuple(value.name for value in graph.output)
    buffers = {name for name in held if kinds.get(name) == "BUFFER"}
    return Program(
        type_name=root,
        nodes=tuple(joined(nodes, outputs, _guessed_classes(nodes, state), constants.number)),
        inputs=tuple(value.name for value in graph.input if value.name not in state),
        outputs=outputs,
        parameters={name: tensor for name, tensor in held.items() if name not in buffers},
        buffers={name: held[name] for name in sorted(buffers)},
    )


def _is_of_a_layer(name: str, paths: set[str], kinds: Mapping[str, str]) -> bool:
    """Whether an initializer is a parameter or buffer, rather than a constant of the graph."""
    return bool(kinds.get(name)) or name.rpartition(".")[0] in paths


def _shared(reads: Sequence[Read], held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return parameters of layers that have one of another layer in the place of their own.

    Of equal constants, such as biases of zeros, an exporter keeps one. Only layers without others
    in them are looked at: any other may well read what is not its own.
    """
    around = {scope.path for read in reads for scope in read.scopes[:-1]}
    found: dict[str, Tensor] = {}
    for read in reads:
        path = read.scopes[-1].path if read.scopes else ""
        for name in read.node.input if path and path not in around else ():
            own = f"{path}.{name.rpartition('.')[2]}"
            if name in held and own not in held:
                found.setdefault(own, held[name])
    return found


def _guessed_classes(reads: Iterable[Read], state: Mapping[str, Any]) -> Classes:
    """Return the classes of layers that do not say theirs, as far as their nodes show it."""
    own: dict[str, list[Any]] = defaultdict(list)
    for read in reads:
        if read.scopes and not read.scopes[-1].type_name:
            own[read.scopes[-1].path].append(read.node)
    return {path: class_of(nodes, state) for path, nodes in own.items()}
