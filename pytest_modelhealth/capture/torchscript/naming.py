"""Which layer each operation of an inlined graph belongs to, and what its parameters are called."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.torchscript.functions import (
    BUFFERS,
    LINEAR,
    ParametricLayer,
    function_name,
    parametric_layer,
    recurrent_names,
)
from pytest_modelhealth.capture.torchscript.places import Frame
from pytest_modelhealth.capture.torchscript.reading import Graph, Operation
from pytest_modelhealth.capture.transcript.program import Scope
from pytest_modelhealth.settings.layer_names import ancestors

_OF_TRACE = "__module."
Site = tuple[Frame, ...]
Step = tuple[str, Site]
"""The name of a module around an operation and the lines that lead to its call."""


@dataclass
class Naming:
    """The layers of a graph.

    Args:
        scopes: the layers around each operation, outermost first.
        parameters: what each layer's parameters are, by their fully qualified names.
        buffers: likewise.
        nameless: the layers whose names are made up, since the graph keeps none.
    """

    scopes: dict[Operation, tuple[Scope, ...]] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    nameless: list[str] = field(default_factory=list)


def name_layers(graph: Graph) -> Naming:
    """Return the layers of a graph, as far as its nodes and constants tell."""
    naming = Naming()
    operations = [one for one in graph.body.all_operations() if one.matters]
    lists = _Lists(graph, operations)
    for operation in operations:
        naming.scopes[operation] = _scopes_of(operation, lists)
    known = {scope.path: scope for scopes in naming.scopes.values() for scope in scopes}
    if not known:
        _name_by_parameters(graph, operations, naming)
    _restore(graph, operations, naming, known)
    _number(graph, operations, naming)
    for operation in operations:
        _take_parameters(operation, graph, naming)
    return naming


def function_of(operation: Operation, graph: Graph) -> str:
    """Return the name of the function that an operation computes."""
    weight = None
    if len(operation.inputs) > 1:
        weight = graph.constants.get(operation.inputs[1].name)
    dimensions = weight.ndim if isinstance(weight, Tensor) else 0
    transposed = operation.kind == "aten::_convolution" and any(
        graph.plain.get(value.name) is True for value in operation.inputs[6:7]
    )
    return function_name(operation.kind, dimensions, transposed)


class _Lists:
    """Finds the containers that TorchScript leaves out: it says ``0`` of ``layers.0``.

    The names of the parameters that are used in a layer have them. Layers that are called at one
    place in the code, as in a loop over a list, lie in the same one.
    """

    def __init__(self, graph: Graph, operations: Iterable[Operation]) -> None:
        self._votes: dict[tuple[Any, ...], Counter[tuple[str, ...]]] = defaultdict(Counter)
        seen = set()
        for operation in operations:
            steps = _steps(operation)
            for value in operation.inputs if steps else ():
                path = graph.paths.get(value.name, "")
                if path and (value.name not in seen or not graph.may_be_several(value.name)):
                    seen.add(value.name)
                    self._vote(steps, path.split(".")[:-1])

    def _vote(self, steps: list[Step], path: list[str]) -> None:
        left_out = _left_out([name for name, _ in steps], path)
        for at, names in enumerate(left_out):
            for key in _keys(steps, at):
                self._votes[key][names] += 1

    def path(self, steps: list[Step]) -> str:
        """Return the fully qualified name of the innermost of the modules around an operation."""
        parts: list[str] = []
        for at, (name, _) in enumerate(steps):
            found = next((self._votes[k] for k in _keys(steps, at) if k in self._votes), None)
            parts += [*(found.most_common(1)[0][0] if found else ()), name]
        return ".".join(parts)


def _keys(steps: list[Step], at: int) -> list[tuple[Any, ...]]:
    """Return what tells which list a module lies in: it itself, then the place it is called at."""
    name, site = steps[at]
    around = tuple(steps[:at])
    return [(around, name, site), *([(around, site)] if site else [])]


def _left_out(names: list[str], path: list[str]) -> list[tuple[str, ...]]:
    """Return for each name what stands before it in a path, beyond the name before; `[]` if none.

    The last name is the last of the path.
    """
    if not names or not path or names[-1] != path[-1]:
        return []
    places = []
    end = len(path)
    for name in reversed(names):
        while end and path[end - 1] != name:
            end -= 1
        if not end:
            return []
        end -= 1
        places.append(end)
    places.reverse()
    starts = [0, *(place + 1 for place in places[:-1])]
    return [tuple(path[a:b]) for a, b in zip(starts, places, strict=True)]


def _steps(operation: Operation) -> list[Step]:
    return [(one.name, operation.place.site(one.depth)) for one in operation.around]


def _scopes_of(operation: Operation, lists: _Lists) -> tuple[Scope, ...]:
    steps = _steps(operation)
    types = [
        _qualified(one.type_name, operation.place.home(one.depth)) for one in operation.around
    ]
    if operation.scope:
        paths = [part.removeprefix(_OF_TRACE) for part in operation.scope.split("/")]
        if len(paths) != len(types):
            types = [""] * len(paths)
    else:
        paths = [lists.path(steps[: at + 1]) for at in range(len(steps))]
    return tuple(map(Scope, paths, types))


def _qualified(type_name: str, home: str) -> str:
    """Return the qualified name of a class, if its forward stands in a file of torch's layers."""
    kind = getattr(nn, type_name, None)
    if isinstance(kind, type) and "torch/nn/" in home.replace("\\", "/"):
        return f"{kind.__module__}.{kind.__qualname__}"
    return type_name


def _name_by_parameters(graph: Graph, operations: list[Operation], naming: Naming) -> None:
    """Make layers of operations with named parameters, where no node tells of any layer."""
    seen = set()
    for operation in operations:
        layer = parametric_layer(function_of(operation, graph))
        names = [v.name for v in operation.inputs if graph.paths.get(v.name)]
        owner = graph.paths[names[0]].rpartition(".")[0] if names else ""
        is_first = not (graph.may_be_several(names[0]) and names[0] in seen) if names else False
        if layer is not None and owner and is_first:
            naming.scopes[operation] = (Scope(owner, layer.type_name),)
            seen.update(names)


def _restore(
    graph: Graph, operations: list[Operation], naming: Naming, known: dict[str, Scope]
) -> None:
    """Give operations that an optimisation put in the place of a layer back to that layer.

    The name of a constant that nothing else takes says which one it was.
    """
    maker = {value.name: one for one in operations for value in one.outputs}
    for operation in operations:
        if not operation.is_made_up or operation.blocks:
            continue
        for value in operation.inputs:
            path = graph.paths.get(value.name, "").rpartition(".")[0]
            if not path or graph.may_be_several(value.name):
                continue
            product = maker.get(operation.inputs[0].name)
            parts = [operation]
            kind = ""
            if product is not None and _is_product(product, graph):
                parts.append(product)
                kind = LINEAR.type_name
            known.setdefault(path, Scope(path, kind))
            outer = [known[name] for name in reversed(list(ancestors(path))) if name in known]
            for part in parts:
                naming.scopes[part] = (*outer, known[path])


def _is_product(operation: Operation, graph: Graph) -> bool:
    weight = operation.inputs[1].name if len(operation.inputs) > 1 else ""
    return operation.kind == "aten::matmul" and operation.is_made_up and weight in graph.constants


def _number(graph: Graph, operations: list[Operation], naming: Naming) -> None:
    """Make layers of operations with parameters where no name of a layer was kept."""
    made: dict[object, Scope] = {}
    counts: Counter[str] = Counter()
    for operation in operations:
        if naming.scopes[operation]:
            continue
        name = function_of(operation, graph)
        layer = parametric_layer(name)
        held = tuple(v.name for v in operation.inputs if v.name in graph.constants)
        several = any(map(graph.may_be_several, held))
        if layer is None or not held or (any(graph.paths[n] for n in held) and not several):
            continue
        key = operation if several else held
        if key not in made:
            stem = "linear" if name == "matmul" else name
            own = f"{stem}_{counts[stem]}" if counts[stem] else stem
            counts[stem] += 1
            made[key] = Scope(own, layer.type_name)
            naming.nameless.append(own)
        naming.scopes[operation] = (made[key],)


def _take_parameters(operation: Operation, graph: Graph, naming: Naming) -> None:
    scopes = naming.scopes[operation]
    inner = scopes[-1] if scopes else Scope("")
    layer = parametric_layer(function_of(operation, graph))
    for at, value in enumerate(operation.inputs):
        tensor = graph.constants.get(value.name)
        if tensor is None:
            continue
        path = graph.paths[value.name]
        if isinstance(tensor, Tensor):
            name = _full_name(path, inner, layer, at)
            if name:
                is_turned = operation.is_made_up and operation.kind == "aten::matmul"
                _keep(name, tensor.T if is_turned else tensor, naming)
        elif layer is not None and layer.kind in (nn.LSTM, nn.GRU):
            plain = [graph.plain.get(one.name) for one in operation.inputs]
            names = recurrent_names(len(tensor), plain[4] or 1, plain[7] is True)
            for own, part in zip(names, tensor, strict=False):
                _keep(f"{inner.path}.{own}", part, naming)


def _full_name(path: str, inner: Scope, layer: ParametricLayer | None, at: int) -> str:
    """Return the name of a parameter that an operation of a layer takes; ``""`` if unknown.

    Equal parameters of several layers are one constant, with the name of one of them: a layer of
    torch's own takes none but its own.
    """
    owner, _, own = path.rpartition(".")
    own = own or (layer.tensors.get(at, "") if layer is not None else "")
    if not own:
        return ""
    if not path or (owner != inner.path and inner.type_name.startswith("torch.nn.")):
        return f"{inner.path}.{own}" if inner.path else own
    return path


def _keep(name: str, tensor: Tensor, naming: Naming) -> None:
    own = name.rpartition(".")[2]
    is_parameter = own not in BUFFERS and (tensor.is_floating_point() or tensor.is_complex())
    dense = tensor.to_dense() if tensor.layout == torch._mkldnn else tensor  # type: ignore[attr-defined]
    (naming.parameters if is_parameter else naming.buffers).setdefault(name, dense.detach())


