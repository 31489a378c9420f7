"""Where the units of each layer go: read off the recorded flow of one run.

A unit is made by a row of a weight. It goes through a norm and an activation, one value of it at a
time, and is then read, at best by columns of the next weights alone.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod

from torch import Tensor, nn

from pytest_modelhealth.layers import ACTIVATION_MODULES, activation_of
from pytest_modelhealth.report import Graph, Kind, Observation, Vertex
from pytest_modelhealth.report.flow.graph import MATRIX_PRODUCTS
from pytest_modelhealth.report.removable import RemovableLayer, UnitSlice

Place = tuple[str, int]
"""A call of a layer: its name, and how many calls of it came before."""

_ZERO_AT_ZERO = frozenset(
    {"celu", "elu", "gelu", "hardshrink", "hardswish", "leaky_relu", "mish", "prelu", "relu"}
    | {"relu6", "rrelu", "selu", "silu", "softshrink", "softsign", "tanh", "tanhshrink"}
)
"""Activations that give zero for zero, as a masked unit is."""

_NOT_ALIKE = frozenset({None, "glu", "log_softmax", "softmax", "softmin"})
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

_EFFECTS = {
    "mean": "mean",
    **dict.fromkeys(("alias", "clone", "contiguous", "detach"), "activation"),
    **dict.fromkeys(("flatten", "reshape", "reshape_alias", "squeeze"), "flat"),
    **dict.fromkeys(("unsafe_view", "unsqueeze", "view"), "flat"),
}
"""What operations do to units: a mean, another layout, or each by itself and all alike."""


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


def parameter_of(full: str, modules: Mapping[str, nn.Module]) -> Tensor:
    """Return the values of a parameter, to write to as well: that raises no version."""
    owner, _, own = full.rpartition(".")
    parameter = held(modules[owner], own)
    assert parameter is not None
    return parameter.data


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


class _Ways:
    """The graph of a run, and what lies behind each vertex."""

    def __init__(
        self, graph: Graph, modules: Mapping[str, nn.Module], shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._graph, self._modules, self._shapes = graph, modules, shapes
        self._takers = defaultdict[int, set[int]](set)
        self._before_output = set(graph.outputs)
        for number, vertex in reversed([*enumerate(graph.vertices)]):
            for operand in vertex.operands:
                self._takers[operand].add(number)
            if number in self._before_output and not self._has_weight(vertex):
                self._before_output.update(vertex.operands)
        counts: Counter[str] = Counter()
        self._places: list[Place] = []
        for call in graph.calls:
            self._places.append((call.layer, counts[call.layer]))
            counts[call.layer] += 1

    def _has_weight(self, vertex: Vertex) -> bool:
        """Whether a vertex is a sum over units: a product with a matrix."""
        if vertex.kind is not Kind.CALL:
            return vertex.function in MATRIX_PRODUCTS or vertex.function == "convolution"
        module = self._modules.get(vertex.name)
        owned = () if module is None else module._parameters.values()
        return any(p is not None and p.ndim > 1 for p in owned)

    def route(self, name: str) -> Route | None:
        """Return where the units of a layer go; ``None`` where that was not seen."""
        module = self._modules[name]
        units = _units(module)
        if held(module, "weight") is None or not units:
            return None  # computed from others: parametrised, generated, quantised
        places, is_output = list[Place](), False
        made = [(name, "weight", _rows(module)), (name, "bias", 0)]
        norms, readers, others = set[str](), set[tuple[str, int]](), list[str]()
        for place, call in zip(self._places, self._graph.calls, strict=True):
            if call.layer != name:
                continue
            if len(call.outputs) != 1:
                return None
            is_output = is_output or call.outputs[0] in self._before_output
            seen_at, vertex = self._looked_at(name, place, call.outputs[0], norms)
            places.append(seen_at)
            for reader in self._readers(name, vertex):
                readers.add(reader) if isinstance(reader, tuple) else others.append(reader)
        made += [(norm, own, 0) for norm in sorted(norms) for own in ("weight", "bias")]
        read = [(n, "weight", 1 - _rows(self._modules[n]), each) for n, each in sorted(readers)]
        layer = RemovableLayer(
            name,
            units,
            self._dimension(name),
            produced=tuple(part for one in made for part in self._slices(*one)),
            read=tuple(part for one in read for part in self._slices(*one)),
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

    def _effect(self, layer: str, vertex: int) -> str:
        """Return what a vertex does to the units of a layer; ``"other"``: a value needs several."""
        found = self._graph.vertices[vertex]
        if found.kind is not Kind.CALL:
            is_pooling = found.function.startswith(_POOLINGS)
            return "alike" if is_pooling else _EFFECTS.get(found.function, "other")
        module, maker = self._modules.get(found.name), self._modules[layer]
        if makes_units(module):
            return "weight"
        if isinstance(module, nn.Flatten):
            return "flat"
        if isinstance(module, _ALIKE):
            return "alike"
        if isinstance(module, _NORMS) and module.num_features == _units(maker):
            is_image = isinstance(maker, nn.modules.conv._ConvNd)
            return "norm" if is_image or len(self._shapes.get(found.name, ())) == 2 else "other"
        if module is not None:
            activation = activation_of(module)
        else:
            function = self._graph.calls[found.call].type_name
            activation = function if function in ACTIVATION_MODULES.values() else None
        if activation in _ZERO_AT_ZERO:
            return "zero at zero"
        return "other" if activation in _NOT_ALIKE else "activation"

    def _looked_at(
        self, layer: str, place: Place, vertex: int, norms: set[str]
    ) -> tuple[Place, int]:
        """Return the call behind which units are looked at and its vertex; add norms on the way.

        That is the first activation, or the last call that takes nothing but the units.
        """
        effect = ""
        while (
            effect != "zero at zero"
            and len(self._takers[vertex]) == 1
            and vertex not in self._graph.outputs
        ):
            (taker,) = self._takers[vertex]
            effect, found = self._effect(layer, taker), self._graph.vertices[taker]
            if effect not in ("zero at zero", "norm", "alike"):
                break
            vertex = taker
            if found.kind is Kind.CALL:
                place = self._places[found.call]
            if effect == "norm":
                norms.add(found.name)
        return place, vertex

    def _readers(self, layer: str, start: int) -> Iterator[tuple[str, int] | str]:
        """Yield each layer whose weight reads the units, with the columns of one, or what else."""
        # a vertex, whether units were flattened before it, and what a mean may have run over
        todo: list[tuple[int, bool, tuple[int, ...] | None]] = [(start, False, None)]
        met = set[int]()
        while todo:
            vertex, is_flat, means = todo.pop()
            for taker in sorted(self._takers[vertex] - met):
                met.add(taker)
                effect, found = self._effect(layer, taker), self._graph.vertices[taker]
                if effect == "weight":
                    yield self._columns(layer, found.name, is_flat, means)
                elif effect == "mean":
                    before = self._graph.vertices[vertex]
                    shape = self._shapes.get(before.name, ()) if before.kind is Kind.CALL else ()
                    here = (0, len(shape) + self._dimension(layer))
                    beside = tuple(size for at, size in enumerate(shape) if at not in here)
                    todo.append((taker, True, beside))
                elif effect not in ("norm", "other"):
                    todo.append((taker, is_flat or effect == "flat", means))
                elif found.kind is Kind.CALL:
                    yield found.name
                elif found.call >= 0:  # else the run itself made it, of what the model returned
                    yield f"`{found.function}`"

    def _columns(
        self, layer: str, name: str, is_flat: bool, means: tuple[int, ...] | None
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
