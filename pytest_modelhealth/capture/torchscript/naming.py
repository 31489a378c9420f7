"""Which layer each operation of an inlined graph belongs to, and what its parameters are called."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, takewhile
from typing import Any

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.torchscript.functions import (
    BIAS,
    BUFFERS,
    LINEAR,
    ParametricLayer,
    function_name,
    in_dimensions,
    is_of,
    parametric_layer,
    recurrent_names,
)
from pytest_modelhealth.capture.torchscript.lists import paths
from pytest_modelhealth.capture.torchscript.reading import Block, Graph, Operation
from pytest_modelhealth.capture.transcript.program import Scope
from pytest_modelhealth.settings.layer_names import ancestors

_CONVOLUTION = re.compile(r"conv_?(?:transpose)?(\d)d")
_OF_TRACE = "__module."
_LONG = frozenset(f"torch.nn.modules.{name}" for name in ("container", "rnn", "transformer"))
_WHY_UNCERTAIN = (
    "an optimisation put an operation at its border, and the script does not tell whether it lies "
    "inside"
)
_WHY_REPEATED = (
    "its operations repeat: whether that is one call or several, the script does not tell"
)


@dataclass
class Naming:
    """The layers of a graph.

    Args:
        scopes: the layers around each operation, outermost first.
        parameters: what each layer's parameters are, by their fully qualified names.
        buffers: likewise.
        nameless: the layers whose names are made up, since the graph keeps none.
        opaque: the layers of which nothing can be told, and why.
        training: the layers that run in training mode.
    """

    scopes: dict[Operation, tuple[Scope, ...]] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    nameless: list[str] = field(default_factory=list)
    opaque: dict[str, str] = field(default_factory=dict)
    training: set[str] = field(default_factory=set)


def name_layers(graph: Graph) -> Naming:
    """Return the layers of a graph, as far as its nodes and constants tell."""
    naming = Naming()
    operations = [one for one in graph.body.all_operations() if one.matters]
    found = paths(graph, operations)
    scopes = {one: _scopes_of(one, found.get(one, [])) for one in operations}
    own = _torchs_own(scopes)
    for operation, around in scopes.items():
        naming.scopes[operation] = tuple(replace(s, type_name=own(s)) for s in around)
    known = {scope.path: scope for around in naming.scopes.values() for scope in around}
    _lend(operations, naming)
    told = bool(known)
    named = _restore(graph, operations, naming, known)
    if not told:
        named |= _name_by_parameters(graph, operations, naming)
    lost = [one for one in operations if one not in named and (one.made_up or not told)]
    numbered = _number(graph, lost, naming)
    if told:
        _hide_uncertain(operations, numbered, naming)
    for operation in operations:
        _take_parameters(operation, graph, naming)
        if _is_training(operation, graph) and naming.scopes[operation]:
            naming.training.add(naming.scopes[operation][-1].path)
    _tell_calls_apart(graph.body, naming)
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


def _scopes_of(operation: Operation, found: list[str]) -> tuple[Scope, ...]:
    """Return the layers around an operation, with the bare names of their classes."""
    types = [one.type_name for one in operation.around]
    if operation.scope:
        found = [part.removeprefix(_OF_TRACE) for part in operation.scope.split("/")]
        types = types if len(found) == len(types) else [""] * len(found)
    return tuple(map(Scope, found, types))


def _torchs_own(scopes: Mapping[Operation, tuple[Scope, ...]]) -> Callable[[Scope], str]:
    """Return what gives a layer's class its qualified name, where it is one of torch's.

    It is if it has the name of one, and no line of its code stands elsewhere.
    """
    others = {
        around[-1].path
        for one, around in scopes.items()
        if around and one.place.mark and not one.place.within_torch
    }

    def qualified(scope: Scope) -> str:
        kind = getattr(nn, scope.type_name, None)
        if isinstance(kind, type) and scope.path not in others:
            return f"{kind.__module__}.{kind.__qualname__}"
        return scope.type_name

    return qualified


def _name_by_parameters(
    graph: Graph, operations: list[Operation], naming: Naming
) -> set[Operation]:
    """Make layers of operations with named parameters, where no node tells of any layer.

    Returns:
        The operations.
    """
    named, seen = set(), set()
    for operation in operations:
        layer = parametric_layer(function_of(operation, graph))
        names = [v.name for v in operation.inputs if graph.paths.get(v.name)]
        owner = graph.paths[names[0]].rpartition(".")[0] if names else ""
        if layer is None or not owner:
            continue
        if names[0] not in seen:
            naming.scopes[operation] = (Scope(owner, layer.type_name),)
            named.add(operation)
        seen.update(names)
    return named


def _lend(operations: list[Operation], naming: Naming) -> None:
    """Let operations that an optimisation put between two of a layer be that layer's."""
    for before, lost, after in _gaps(operations, naming):
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False))
        shared = tuple(scope for scope, _ in pairs)
        naming.scopes.update(dict.fromkeys(lost, shared))


def _gaps(
    operations: list[Operation], naming: Naming
) -> Iterator[tuple[tuple[Scope, ...], list[Operation], tuple[Scope, ...]]]:
    """Yield the operations that an optimisation put side by side, and the layers around both."""
    before: tuple[Scope, ...] = ()
    lost: list[Operation] = []
    for operation in operations:
        if operation.made_up:
            lost.append(operation)
            continue
        after = naming.scopes[operation]
        if lost:
            yield before, lost, after
        before, lost = after, []
    if lost:
        yield before, lost, ()


def _hide_uncertain(operations: list[Operation], nameless: set[Operation], naming: Naming) -> None:
    """Call opaque what begins or ends where an operation may be its own or belong around it."""
    for before, lost, after in _gaps(operations, naming):
        here = [naming.scopes[one] for one in lost if one in nameless]
        for scopes in (before, after) if here else ():
            inner = [scope for scope in scopes if all(scope not in around for around in here)]
            naming.opaque |= {s.path: _WHY_UNCERTAIN for s in inner if not _is_simple(s)}


def _restore(
    graph: Graph, operations: list[Operation], naming: Naming, known: dict[str, Scope]
) -> set[Operation]:
    """Give operations that an optimisation put in the place of a layer back to that layer.

    The name of a constant that no other layer can have says which one it was.

    Returns:
        The operations.
    """
    restored: set[Operation] = set()
    maker = {value.name: one for one in operations for value in one.outputs}
    for operation in operations:
        owners = {
            graph.paths[value.name].rpartition(".")[0]
            for value in operation.inputs
            if graph.paths.get(value.name) and graph.uses[value.name] == 1
        }
        if not operation.made_up or operation.blocks or len(owners) != 1 or "" in owners:
            continue
        (path,) = owners
        product = maker.get(operation.inputs[0].name)
        is_linear = product is not None and _is_product(product, graph)
        parts = [product, operation] if product is not None and is_linear else [operation]
        layer = LINEAR if is_linear else parametric_layer(function_of(operation, graph))
        known.setdefault(path, Scope(path, "" if layer is None else layer.type_name))
        outer = [known[name] for name in reversed(list(ancestors(path))) if name in known]
        naming.scopes.update(dict.fromkeys(parts, (*outer, known[path])))
        restored.update(parts)
    return restored


def _is_product(operation: Operation, graph: Graph) -> bool:
    weight = operation.inputs[1].name if len(operation.inputs) > 1 else ""
    return operation.kind == "aten::matmul" and operation.made_up and weight in graph.constants


def _number(graph: Graph, operations: list[Operation], naming: Naming) -> set[Operation]:
    """Make a layer of each operation with parameters, where no name of a layer was kept.

    Returns:
        The operations.
    """
    numbered: set[Operation] = set()
    maker = {value.name: one for one in graph.body.all_operations() for value in one.outputs}
    biases = {one.inputs[0].name: one for one in operations if _is_bias(one, graph)}
    counts: Counter[str] = Counter()
    for operation in operations:
        name = function_of(operation, graph)
        layer = parametric_layer(name)
        if layer is None or all(v.name not in graph.constants for v in operation.inputs):
            continue
        around = naming.scopes[operation]
        own = "linear" if name == "matmul" else name
        path = f"{around[-1].path}.{own}" if around else own
        counts[path] += 1
        path = f"{path}_{counts[path] - 1}" if counts[path] > 1 else path
        scope = Scope(path, _in_space(operation, layer, graph, maker))
        naming.scopes[operation] = (*around, scope)
        if name == "matmul" and (bias := biases.get(operation.outputs[0].name)) is not None:
            naming.scopes[bias] = (*around, scope)
        naming.nameless.append(path)
        numbered.add(operation)
    return numbered


def _is_bias(operation: Operation, graph: Graph) -> bool:
    """Whether an operation adds the bias of a linear layer that an optimisation split."""
    is_sum = operation.kind == "aten::add" and operation.made_up
    return is_sum and operation.inputs[1].name in graph.constants


def _in_space(
    operation: Operation, layer: ParametricLayer, graph: Graph, maker: Mapping[str, Operation]
) -> str:
    """Return the qualified name of a layer's class, after the convolution that it follows."""
    before: Operation | None = operation
    while before is not None and before.inputs:
        before = maker.get(before.inputs[0].name)
        if before is not None and (found := _CONVOLUTION.fullmatch(function_of(before, graph))):
            return in_dimensions(layer, int(found[1])).type_name
    return layer.type_name


def _tell_calls_apart(block: Block, naming: Naming, outer: int = 0) -> None:
    """Number the calls of layers that follow one another, as far as they can be told apart.

    A simple layer of torch's runs no line twice in one call.

    Args:
        block: the operations.
        naming: the layers, whose calls are numbered.
        outer: how many layers lie around the whole block.
    """
    for operation in block.operations:
        for inner in operation.blocks:
            _tell_calls_apart(inner, naming, len(naming.scopes.get(operation, ())))
    depths = [len(naming.scopes.get(one, ())) for one in block.operations]
    for depth in range(outer, max(depths, default=0)):
        runs = groupby(block.operations, partial(_at, naming, depth))
        for scope, run in [(scope, list(run)) for scope, run in runs if scope is not None]:
            own = [one for one in run if one.place.mark or one.made_up]
            keys = [(naming.scopes[one][depth + 1 :], one.kind, one.place.mark) for one in own]
            if len(set(keys)) == len(keys):
                continue
            if _is_simple(scope):
                _number_calls(own, keys, depth, naming)
            elif _repeats(keys) and not scope.type_name.startswith("torch.nn."):
                naming.opaque[scope.path] = _WHY_REPEATED


def _is_simple(scope: Scope) -> bool:
    """Whether a layer is one of torch's whose forward is a call or two."""
    home, _, name = scope.type_name.rpartition(".")
    is_torchs = home.startswith("torch.nn.modules.") and home not in _LONG
    return is_torchs and name != nn.MultiheadAttention.__name__


def _at(naming: Naming, depth: int, operation: Operation) -> Scope | None:
    scopes = naming.scopes.get(operation, ())
    return scopes[depth] if depth < len(scopes) else None


def _number_calls(
    operations: list[Operation], keys: list[tuple[Any, ...]], depth: int, naming: Naming
) -> None:
    seen: set[tuple[Any, ...]] = set()
    call = 0
    for operation, key in zip(operations, keys, strict=True):
        if key in seen:
            call += 1
            seen.clear()
        seen.add(key)
        scopes = naming.scopes[operation]
        numbered = replace(scopes[depth], call=(call,))
        naming.scopes[operation] = (*scopes[:depth], numbered, *scopes[depth + 1 :])


def _repeats(keys: list[tuple[Any, ...]]) -> bool:
    """Whether a row is made up of equal parts."""
    size = len(keys)
    return any(
        size % part == 0 and keys == keys[:part] * (size // part)
        for part in range(1, size // 2 + 1)
    )


def _layer_of(operation: Operation, graph: Graph) -> ParametricLayer | None:
    """Return the layer that an operation makes up, or its part of a linear one that was split."""
    if operation.made_up and operation.kind == "aten::add":
        return BIAS
    return parametric_layer(function_of(operation, graph))


def _is_training(operation: Operation, graph: Graph) -> bool:
    """Whether an operation was made in training mode: it takes the statistics of each batch."""
    is_norm = operation.kind == "aten::batch_norm"
    return is_norm and graph.plain.get(operation.inputs[5].name) is True


def _take_parameters(operation: Operation, graph: Graph, naming: Naming) -> None:
    scopes = naming.scopes[operation]
    inner = scopes[-1] if scopes else Scope("")
    layer = _layer_of(operation, graph)
    for at, value in enumerate(operation.inputs):
        tensor = graph.constants.get(value.name)
        if tensor is None:
            continue
        if isinstance(tensor, Tensor):
            name = _full_name(value.name, at, inner, layer, graph)
            if name:
                is_turned = operation.made_up and operation.kind == "aten::matmul"
                _keep(name, tensor.T if is_turned else tensor, naming)
        elif layer is not None and layer.kind in (nn.LSTM, nn.GRU):
            plain = [graph.plain.get(one.name) for one in operation.inputs]
            names = recurrent_names(len(tensor), plain[4] or 1, plain[7] is True)
            for own, part in zip(names, tensor, strict=False):
                _keep(f"{inner.path}.{own}", part, naming)


def _full_name(
    name: str, at: int, inner: Scope, layer: ParametricLayer | None, graph: Graph
) -> str:
    """Return the name of a parameter that an operation of a layer takes; ``""`` if unknown.

    Equal parameters of several layers are one constant, with the name of one of them: what a layer
    takes that is one operation is its own all the same.
    """
    path = graph.paths[name]
    owner, _, own = path.rpartition(".")
    if path and (owner == inner.path or inner.path in ancestors(owner)):
        return path
    if layer is not None and is_of(layer, inner.type_name) and (at in layer.tensors):
        own = layer.tensors[at]
        return f"{inner.path}.{own}" if inner.path else own
    return path if graph.uses[name] == 1 else ""


def _keep(name: str, tensor: Tensor, naming: Naming) -> None:
    own = name.rpartition(".")[2]
    is_parameter = own not in BUFFERS and (tensor.is_floating_point() or tensor.is_complex())
    is_strided = tensor.layout == torch.strided
    dense = tensor if is_strided else tensor.to_dense()
    (naming.parameters if is_parameter else naming.buffers).setdefault(name, dense.detach())
