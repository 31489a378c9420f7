"""Where the units of each layer go: read off the recorded flow of one run.

A unit is made by a row of a weight. It goes through a norm and an activation, one value of it at a
time, and is then read, at best by columns of the next weights alone.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod

import networkx as nx
from torch import Tensor, nn

from pytest_modelhealth.layers import ACTIVATION_MODULES, activation_of
from pytest_modelhealth.report import Graph, Kind, Observation
from pytest_modelhealth.report.flow.graph import MATRIX_PRODUCTS
from pytest_modelhealth.report.removable import RemovableLayer, UnitSlice

_Means = tuple[int, ...] | None
"""The sizes beside the units of which a mean was taken on the way; ``None`` without one."""
Place = tuple[str, int]
"""A call of a layer: its name, and how many calls of it came before."""

_ZERO_AT_ZERO = frozenset(
    {"celu", "elu", "gelu", "hardshrink", "hardswish", "leaky_relu", "mish", "prelu", "relu"}
    | {"relu6", "rrelu", "selu", "silu", "softshrink", "softsign", "tanh", "tanhshrink"}
)
"""Activations that give zero for zero, as a masked unit is."""

_NOT_ALIKE = frozenset({None, "glu", "log_softmax", "prelu", "softmax", "softmin"})
"""Activations that treat units each in its way, or have them part in each other's values."""

_ALIKE = (
    nn.Identity,
    nn.Dropout,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.modules.dropout._DropoutNd,
    nn.modules.pooling._AdaptiveAvgPoolNd,
    nn.modules.pooling._AdaptiveMaxPoolNd,
    nn.modules.pooling._AvgPoolNd,
    nn.modules.pooling._LPPoolNd,
    nn.modules.pooling._MaxPoolNd,
    nn.Upsample,
)
_POOLINGS = ("adaptive_avg_pool", "adaptive_max_pool", "avg_pool", "max_pool", "upsample")
"""How the names begin of operations that treat every unit by itself, and all alike."""

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
"""Norms of each unit by itself."""

_FLATTENED = frozenset(
    {"flatten", "reshape", "reshape_alias", "squeeze", "unsafe_view", "unsqueeze", "view"}
)
_UNCHANGED = frozenset({"alias", "clone", "contiguous", "detach"})


def makes_units(module: nn.Module | None) -> bool:
    """Whether rows of a module's weight make its units."""
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return module.groups == 1
    return isinstance(module, nn.modules.conv._ConvNd | nn.Linear) or _is_transposed(module)


def _is_transposed(module: nn.Module | None) -> bool:
    """Whether a module is the linear layer of GPT-2, whose weight is of shape (inputs, outputs)."""
    home = sys.modules.get("transformers.pytorch_utils")
    return home is not None and isinstance(module, home.Conv1D)


def _rows(module: nn.Module) -> int:
    """Return the dimension of a weight in which the units lie that it makes; the other is read."""
    return int(isinstance(module, nn.modules.conv._ConvTransposeNd) or _is_transposed(module))


def _units(module: nn.Module) -> int:
    if isinstance(module, nn.modules.conv._ConvNd):
        return module.out_channels
    weight = held(module, "weight")
    return 0 if weight is None else weight.shape[_rows(module)]


def held(module: nn.Module, name: str) -> Tensor | None:
    """Return a parameter; pruned, its original."""
    found = module._parameters.get(name)
    return module._parameters.get(f"{name}_orig") if found is None else found


@dataclass(frozen=True)
class Route:
    """Where the units of one layer go.

    Args:
        layer: the layer whose weight makes them, and what reads them; no unit of it can go yet.
        places: the calls behind which they are looked at, one for each call of the layer.
        is_output: whether they come to an output of the model with no weight in between.
    """

    layer: RemovableLayer
    places: tuple[Place, ...]
    is_output: bool

    def joined(self, other: Route) -> Route:
        """Return the route of a model that went another way in another batch."""
        one, two = self.layer, other.layer
        layer = replace(
            one,
            produced=tuple(dict.fromkeys(one.produced + two.produced)),
            read=tuple(dict.fromkeys(one.read + two.read)),
            read_by=one.read_by or two.read_by,
        )
        return Route(layer, other.places, self.is_output or other.is_output)


def routes(observation: Observation, modules: Mapping[str, nn.Module]) -> dict[str, Route]:
    """Return where the units of each layer went in a run, in execution order."""
    flow = observation.flow
    if flow is None:
        return {}
    records = observation.layers.values()
    shapes = {r.name: r.activations.shape for r in records if r.activations is not None}
    ways = _Ways(flow.graph, modules, shapes)
    called = dict.fromkeys(call.layer for call in flow.graph.calls)
    found = {name: ways.route(name) for name in called if makes_units(modules.get(name))}
    return {name: route for name, route in found.items() if route is not None}


_END = -1
"""A vertex behind all outputs of the model."""


class _Ways:
    """The graph of a run, and what lies behind each vertex."""

    def __init__(
        self, graph: Graph, modules: Mapping[str, nn.Module], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._graph, self._modules, self._shapes = graph, modules, shapes
        self._takers: nx.DiGraph[int] = nx.DiGraph()
        self._takers.add_nodes_from(range(len(graph.vertices)))
        self._takers.add_edges_from(
            (operand, number)
            for number, vertex in enumerate(graph.vertices)
            for operand in vertex.operands
        )
        weights = {number for number in self._takers if self._has_weight(number)}
        ways: nx.DiGraph[int] = nx.DiGraph((output, _END) for output in graph.outputs)
        ways.add_edges_from(edge for edge in self._takers.edges if edge[1] not in weights)
        self._before_output = nx.ancestors(ways, _END) if graph.outputs else set()
        counts: Counter[str] = Counter()
        self._places: list[Place] = []
        for call in graph.calls:
            self._places.append((call.layer, counts[call.layer]))
            counts[call.layer] += 1

    def route(self, name: str) -> Route | None:
        """Return where the units of a layer go; ``None`` where that was not seen."""
        module = self._modules[name]
        units = _units(module)
        if held(module, "weight") is None or not units:
            return None  # computed from others: parametrised, generated, quantised
        places: list[Place] = []
        norms, readers, others = set[str](), set[tuple[str, int]](), list[str]()
        is_output = False
        for number, call in enumerate(self._graph.calls):
            if call.layer != name:
                continue
            if len(call.outputs) != 1:
                return None
            place, vertex = self._looked_at(name, number, call.outputs[0], norms)
            places.append(place)
            is_output = is_output or vertex in self._before_output
            for reader in self._readers(name, vertex):
                readers.add(reader) if isinstance(reader, tuple) else others.append(reader)
        made = [(name, "weight", _rows(module)), (name, "bias", 0)]
        made += [(norm, own, 0) for norm in sorted(norms) for own in ("weight", "bias")]
        layer = RemovableLayer(
            name,
            units,
            self._dimension(name),
            produced=tuple(slice_ for one in made for slice_ in self._slices(*one)),
            read=tuple(
                slice_
                for reader, each in sorted(readers)
                for slice_ in self._slices(reader, "weight", 1 - _rows(self._modules[reader]), each)
            ),
            read_by=others[0] if others else "",
        )
        return Route(layer, tuple(places), is_output)

    def _slices(self, layer: str, own: str, dimension: int, each: int = 1) -> Iterator[UnitSlice]:
        parameter = held(self._modules[layer], own)
        if parameter is not None:
            full = f"{layer}.{own}" if layer else own
            yield UnitSlice(full, tuple(parameter.shape), dimension, each)

    def _dimension(self, layer: str) -> int:
        """Return the dimension of the units in the output, counted from the end."""
        module = self._modules[layer]
        return -1 - len(module.kernel_size) if isinstance(module, nn.modules.conv._ConvNd) else -1

    def _looked_at(
        self, layer: str, number: int, vertex: int, norms: set[str]
    ) -> tuple[Place, int]:
        """Return the call behind which units are looked at and its vertex; add norms on the way.

        That is the first activation, or the last call that takes nothing but the units.
        """
        place = self._places[number]
        while len(self._takers[vertex]) == 1 and vertex not in self._graph.outputs:
            (taker,) = self._takers[vertex]
            found = self._graph.vertices[taker]
            is_activation = self._activation(taker) in _ZERO_AT_ZERO
            is_norm = found.kind is Kind.CALL and self._is_norm_of(layer, found.name)
            if not (is_activation or is_norm or self._is_alike(taker)):
                break
            vertex = taker
            if found.kind is Kind.CALL:
                place = self._places[found.call]
            if is_norm:
                norms.add(found.name)
            if is_activation:
                break
        return place, vertex

    def _is_alike(self, vertex: int) -> bool:
        """Whether every unit is treated by itself, and all alike."""
        found = self._graph.vertices[vertex]
        if found.kind is not Kind.CALL:
            return found.function.startswith(_POOLINGS)
        return isinstance(self._modules.get(found.name), _ALIKE)

    def _is_norm_of(self, layer: str, name: str) -> bool:
        module = self._modules.get(name)
        if not isinstance(module, _NORMS) or module.num_features != _units(self._modules[layer]):
            return False
        is_image = isinstance(self._modules[layer], nn.modules.conv._ConvNd)
        return is_image or len(self._shapes.get(name, ())) == 2

    def _activation(self, vertex: int) -> str | None:
        found = self._graph.vertices[vertex]
        if found.kind is not Kind.CALL:
            return None
        module = self._modules.get(found.name)
        if module is not None:
            return activation_of(module)
        function = self._graph.calls[found.call].type_name
        return function if function in ACTIVATION_MODULES.values() else None

    def _readers(self, layer: str, start: int) -> Iterator[tuple[str, int] | str]:
        """Yield each layer whose weight reads the units, with the columns of one, or what else."""
        todo: list[tuple[int, bool, _Means]] = [(start, False, None)]
        met = set[int]()
        while todo:
            vertex, is_flat, means = todo.pop()
            for taker in self._takers[vertex]:
                if taker in met:
                    continue
                met.add(taker)
                found = self._graph.vertices[taker]
                is_call = found.kind is Kind.CALL
                module = self._modules.get(found.name) if is_call else None
                operation = "" if is_call else found.function
                if makes_units(module):
                    yield self._columns(layer, found.name, is_flat=is_flat, means=means)
                elif operation == "mean":
                    todo.append((taker, True, self._beside(layer, vertex)))
                elif isinstance(module, nn.Flatten) or operation in _FLATTENED:
                    todo.append((taker, True, means))
                elif (
                    self._is_alike(taker)
                    or self._activation(taker) not in _NOT_ALIKE
                    or operation in _UNCHANGED
                ):
                    todo.append((taker, is_flat, means))
                elif is_call:
                    yield found.name
                elif found.call >= 0:  # else the run itself made it, of what the model returned
                    yield f"`{found.function}`"

    def _beside(self, layer: str, vertex: int) -> tuple[int, ...]:
        """Return the sizes of what a layer gave but for samples and units; none if not known."""
        found = self._graph.vertices[vertex]
        shape = self._shapes.get(found.name, ()) if found.kind is Kind.CALL else ()
        units = len(shape) + self._dimension(layer)
        return tuple(size for place, size in enumerate(shape) if place not in (0, units))

    def _columns(
        self, layer: str, name: str, *, is_flat: bool, means: _Means
    ) -> tuple[str, int] | str:
        """Return a reader with the columns of one unit, or say why that is not known."""
        module, units = self._modules[name], _units(self._modules[layer])
        weight = held(module, "weight")
        if weight is None or getattr(module, "groups", 1) != 1:
            return f"{name}, not every unit by every column"
        width = weight.shape[1 - _rows(module)]
        if means is not None:  # it may run over the units, and leave what is beside them
            choices = (c for n in range(len(means) + 1) for c in combinations(means, n))
            beside = set(map(prod, choices))
            is_left = width % units == 0 and width // units in beside and width not in beside
            return (name, width // units) if is_left else f"{name}, behind a mean"
        convolution = nn.modules.conv._ConvNd
        is_image = isinstance(self._modules[layer], convolution)
        if width == units and (is_image or not is_flat):
            return name, 1
        if is_flat and is_image and not isinstance(module, convolution) and width % units == 0:
            return name, width // units
        return f"{name}, in another layout"

    def _has_weight(self, vertex: int) -> bool:
        """Whether a vertex is a sum over units: a product with a matrix."""
        found = self._graph.vertices[vertex]
        if found.kind is not Kind.CALL:
            return found.function in MATRIX_PRODUCTS or found.function == "convolution"
        module = self._modules.get(found.name)
        owned = () if module is None else module._parameters.values()
        return any(p is not None and p.ndim > 1 for p in owned)
