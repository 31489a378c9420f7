"""Where the units of each layer go: read off the recorded flow of one run.

A unit is made by a row of a weight. It goes through a norm and an activation, one value of it at a
time, and is then read, at best by columns of the next weights alone.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import prod

from torch import Tensor, nn

from pytest_modelhealth.layers import ACTIVATION_MODULES, activation_of
from pytest_modelhealth.report import Graph, Kind, Observation
from pytest_modelhealth.report.flow.graph import MATRIX_PRODUCTS
from pytest_modelhealth.report.removable import UnitSlice

_Means = tuple[int, ...] | None
"""The sizes beside the units of which a mean was taken on the way; ``None`` without one."""
Place = tuple[str, int]
"""A call of a layer: its name, and how many calls of it came before."""

_ZERO_AT_ZERO = frozenset(
    {"celu", "elu", "gelu", "hardshrink", "hardswish", "leaky_relu", "mish", "prelu", "relu"}
    | {"relu6", "rrelu", "selu", "silu", "softshrink", "softsign", "tanh", "tanhshrink"}
)
"""Activations that give zero for zero, as a masked unit is."""

_ACROSS_UNITS = frozenset({"glu", "log_softmax", "softmax", "softmin"})
"""Activations in which units have a part in each other's values."""

_UNIFORM = (
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
"""Modules that treat every unit by itself, and all alike."""

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
"""Norms of each unit by itself."""

_FLATTENED = frozenset(
    {"flatten", "mean", "reshape", "reshape_alias", "squeeze", "unsafe_view", "unsqueeze", "view"}
)
_UNCHANGED = frozenset({"alias", "clone", "contiguous", "detach"})
_POOLINGS = ("adaptive_avg_pool", "adaptive_max_pool", "avg_pool", "max_pool", "upsample")
"""How the names begin of operations that treat every unit by itself, and all alike."""


def makes_units(module: nn.Module | None) -> bool:
    """Whether rows of a module's weight make its units."""
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return module.groups == 1
    return isinstance(module, nn.modules.conv._ConvNd) or _is_linear(module)


def _is_linear(module: nn.Module | None) -> bool:
    return isinstance(module, nn.Linear) or _is_transposed_linear(module)


def _is_transposed_linear(module: nn.Module | None) -> bool:
    """Whether a module is the linear layer of GPT-2, whose weight is of shape (inputs, outputs)."""
    home = sys.modules.get("transformers.pytorch_utils")
    return home is not None and isinstance(module, home.Conv1D)


def units_of(module: nn.Module) -> int:
    """Return how many units a module of `makes_units` has."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return module.out_channels
    weight = held(module, "weight")
    return 0 if weight is None else weight[1].shape[_row_dimension(module)]


def held(module: nn.Module, name: str) -> tuple[str, Tensor] | None:
    """Return a parameter and the name it is kept by: pruned, that of its original."""
    for own in (name, f"{name}_orig"):
        parameter = module._parameters.get(own)
        if parameter is not None:
            return own, parameter
    return None


def _unit_dimension(module: nn.Module) -> int:
    """Return the dimension of the units in the output, counted from the end."""
    if isinstance(module, nn.modules.conv._ConvNd):
        return -1 - len(module.kernel_size)
    return -1


@dataclass(frozen=True)
class Route:
    """Where the units of one layer go.

    Args:
        layer: the layer whose weight makes them.
        units: how many there are.
        dimension: where they lie in its output, counted from the end.
        places: the calls behind which they are looked at, one for each call of the layer.
        norms: the norms before these.
        readers: the layers whose weights read them, and how many columns one unit has.
        read_by: what else reads them, a phrase; ``""`` if nothing does.
        is_output: whether they come to an output of the model with no weight in between.
    """

    layer: str
    units: int
    dimension: int
    places: tuple[Place, ...]
    norms: frozenset[str]
    readers: frozenset[tuple[str, int]]
    read_by: str
    is_output: bool

    def joined(self, other: Route) -> Route:
        """Return the route of a model that went another way in another batch."""
        return Route(
            self.layer,
            self.units,
            self.dimension,
            other.places,
            self.norms | other.norms,
            self.readers | other.readers,
            self.read_by or other.read_by,
            self.is_output or other.is_output,
        )


def routes(observation: Observation, modules: Mapping[str, nn.Module]) -> dict[str, Route]:
    """Return where the units of each layer went in a run, in execution order."""
    flow = observation.flow
    if flow is None:
        return {}
    ways = _Ways(flow.graph, modules, _shapes(observation))
    called = dict.fromkeys(call.layer for call in flow.graph.calls)
    found = (ways.route(name) for name in called if makes_units(modules.get(name)))
    return {route.layer: route for route in found if route is not None}


def _shapes(observation: Observation) -> dict[str, tuple[int, ...]]:
    """Return the shape of the output of each layer."""
    records = observation.layers.values()
    return {r.name: r.activations.shape for r in records if r.activations is not None}


class _Ways:
    """The graph of a run, and what lies next to each vertex."""

    def __init__(
        self, graph: Graph, modules: Mapping[str, nn.Module], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._graph, self._modules, self._shapes = graph, modules, shapes
        self._takers: list[list[int]] = [[] for _ in graph.vertices]
        for number, vertex in enumerate(graph.vertices):
            for operand in dict.fromkeys(vertex.operands):
                self._takers[operand].append(number)
        counts: Counter[str] = Counter()
        self._places: list[Place] = []
        self._calls: dict[str, list[int]] = {}
        for number, call in enumerate(graph.calls):
            self._places.append((call.layer, counts[call.layer]))
            counts[call.layer] += 1
            self._calls.setdefault(call.layer, []).append(number)

    def route(self, layer: str) -> Route | None:
        """Return where the units of a layer go; ``None`` where that was not seen."""
        module = self._modules[layer]
        if held(module, "weight") is None or not units_of(module):
            return None  # computed from others: parametrised, generated, quantised
        places, norms, readers, others = [], set[str](), set[tuple[str, int]](), list[str]()
        is_output = False
        for number in self._calls[layer]:
            outputs = self._graph.calls[number].outputs
            if len(outputs) != 1:
                return None
            place, vertex, met = self._judged(layer, number, outputs[0])
            places.append(place)
            norms |= met
            is_output = is_output or self._is_output(vertex)
            for reader in self._readers(layer, vertex):
                readers.add(reader) if isinstance(reader, tuple) else others.append(reader)
        return Route(
            layer,
            units_of(module),
            _unit_dimension(module),
            tuple(places),
            frozenset(norms),
            frozenset(readers),
            next(iter(others), ""),
            is_output,
        )

    def _judged(self, layer: str, number: int, vertex: int) -> tuple[Place, int, set[str]]:
        """Return the call behind which units are looked at, its vertex, and norms on the way.

        That is the first activation, or the last call that takes nothing but the units.
        """
        place, norms = self._places[number], set[str]()
        while len(takers := self._takers[vertex]) == 1 and vertex not in self._graph.outputs:
            (taker,) = takers
            found = self._graph.vertices[taker]
            if found.function.startswith(_POOLINGS) and found.kind is not Kind.CALL:
                vertex = taker
                continue
            if found.kind is not Kind.CALL:
                break
            step = self._step(layer, found.name)
            if step == "":
                break
            place, vertex = self._places[found.call], taker
            if step == "norm":
                norms.add(found.name)
            elif step == "activation":
                break
        return place, vertex, norms

    def _step(self, layer: str, name: str) -> str:
        """Return what a layer does with each unit by itself, keeping masked ones zero."""
        module = self._modules.get(name)
        if isinstance(module, _UNIFORM):
            return "uniform"
        if isinstance(module, _NORMS):
            is_of_units = module.num_features == units_of(self._modules[layer])
            in_place = not _is_linear(self._modules[layer])
            return (
                "norm" if is_of_units and (in_place or len(self._shapes.get(name, ())) == 2) else ""
            )
        return "activation" if self._activation(name) in _ZERO_AT_ZERO else ""

    def _activation(self, name: str) -> str | None:
        module = self._modules.get(name)
        if module is not None:
            return activation_of(module)
        function = next(c.type_name for c in self._graph.calls if c.layer == name)
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
                if found.kind is not Kind.CALL:
                    is_view = found.function in _FLATTENED
                    is_alike = found.function.startswith(_POOLINGS)
                    if is_view or is_alike or found.function in _UNCHANGED:
                        is_mean = found.function == "mean"
                        beside = self._beside(layer, vertex) if is_mean else means
                        todo.append((taker, is_flat or is_view, beside))
                    elif not self._is_ours(taker):
                        yield f"`{found.function}`"
                elif isinstance(module := self._modules.get(found.name), nn.Flatten):
                    todo.append((taker, True, means))
                elif makes_units(module):
                    yield self._columns(layer, found.name, is_flat=is_flat, means=means)
                elif isinstance(module, _UNIFORM) or self._is_uniform_activation(found.name):
                    todo.append((taker, is_flat, means))
                else:
                    yield found.name

    def _is_uniform_activation(self, name: str) -> bool:
        activation = self._activation(name)
        return activation is not None and activation not in _ACROSS_UNITS | {"prelu"}

    def _beside(self, layer: str, vertex: int) -> tuple[int, ...]:
        """Return the sizes of what a layer gave but for samples and units; none if not known."""
        found = self._graph.vertices[vertex]
        shape = self._shapes.get(found.name, ()) if found.kind is Kind.CALL else ()
        units = len(shape) + _unit_dimension(self._modules[layer])
        return tuple(size for place, size in enumerate(shape) if place not in (0, units))

    def _columns(
        self, layer: str, name: str, *, is_flat: bool, means: _Means
    ) -> tuple[str, int] | str:
        """Return a reader with the columns of one unit, or say why that is not known."""
        module, source = self._modules[name], self._modules[layer]
        units, weight = units_of(source), held(module, "weight")
        if weight is None or getattr(module, "groups", 1) != 1:
            return f"{name}, not every unit by every column"
        width = weight[1].shape[_column_dimension(module)]
        if means is not None:  # it may run over the units, and leave what is beside them
            choices = (c for n in range(len(means) + 1) for c in combinations(means, n))
            beside = set(map(prod, choices))
            is_left = width % units == 0 and width // units in beside and width not in beside
            return (name, width // units) if is_left else f"{name}, behind a mean"
        if width == units and not (is_flat and _is_linear(source)):
            return name, 1
        is_image = not _is_linear(source) and _is_linear(module)
        if is_flat and is_image and width % units == 0:
            return name, width // units
        return f"{name}, in another layout"

    def _is_ours(self, vertex: int) -> bool:
        """Whether the run itself made a vertex, of what the model returned."""
        return self._graph.vertices[vertex].call < 0

    def _is_output(self, start: int) -> bool:
        """Whether an output of the model is made of a vertex with no weight in between."""
        todo, met = [start], set[int]()
        while todo:
            vertex = todo.pop()
            if vertex in met:
                continue
            met.add(vertex)
            if vertex in self._graph.outputs:
                return True
            todo += [taker for taker in self._takers[vertex] if not self._has_weight(taker)]
        return False

    def _has_weight(self, vertex: int) -> bool:
        """Whether a vertex is a sum over units: a product with a matrix."""
        found = self._graph.vertices[vertex]
        if found.kind is not Kind.CALL:
            return found.function in MATRIX_PRODUCTS or found.function == "convolution"
        module = self._modules.get(found.name)
        owned = () if module is None else module._parameters.values()
        return any(p is not None and p.ndim > 1 for p in owned)


def _row_dimension(module: nn.Module) -> int:
    """Return the dimension of a weight in which the units lie that it makes."""
    is_transposed = isinstance(module, nn.modules.conv._ConvTransposeNd)
    return int(is_transposed or _is_transposed_linear(module))


def _column_dimension(module: nn.Module) -> int:
    """Return the dimension of a weight in which the units lie that it reads."""
    return 1 - _row_dimension(module)


def produced(route: Route, modules: Mapping[str, nn.Module]) -> tuple[UnitSlice, ...]:
    """Return where the units stand in the weights that make them and the norms behind."""
    module = modules[route.layer]
    owners = [(route.layer, "weight", _row_dimension(module)), (route.layer, "bias", 0)]
    owners += [(name, own, 0) for name in sorted(route.norms) for own in ("weight", "bias")]
    found = []
    for layer, own, dimension in owners:
        parameter = held(modules[layer], own)
        if parameter is not None:
            full = f"{layer}.{own}" if layer else own
            found.append(UnitSlice(full, tuple(parameter[1].shape), dimension))
    return tuple(found)


def read(route: Route, modules: Mapping[str, nn.Module]) -> tuple[UnitSlice, ...]:
    """Return where the units stand in the weights that read them."""
    found = []
    for name, each in sorted(route.readers):
        parameter = held(modules[name], "weight")
        assert parameter is not None
        full = f"{name}.weight" if name else "weight"
        shape = tuple(parameter[1].shape)
        found.append(UnitSlice(full, shape, _column_dimension(modules[name]), each))
    return tuple(found)
