"""Makes plain records of what was found and proven, with what the units cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from torch import nn

from pytest_modelhealth.removal.finding import Found
from pytest_modelhealth.removal.proving import Prover
from pytest_modelhealth.removal.ways import produced, read
from pytest_modelhealth.report.removable import Removable, RemovableLayer


class MultiplyAdds(NamedTuple):
    """Multiply-adds a sample: of the whole forward, and by layer; ``None`` where not measured."""

    whole: int | None
    layers: Mapping[str, int]


def candidates(
    found: Found, modules: Mapping[str, nn.Module]
) -> tuple[RemovableLayer, tuple[str, ...]]:
    """Return the units of a layer that look removable, and why others that do are not.

    Units that are outputs of the model have to be given, whatever they are.
    """
    route, seen = found.route, found.seen
    layer = RemovableLayer(
        name=route.layer,
        units=route.units,
        dimension=route.dimension,
        samples=seen.samples,
        produced=produced(route, modules),
        read=read(route, modules),
        read_by=route.read_by,
    )
    if route.is_output:
        return layer, ()
    masked = {*found.inactive, *found.unused}
    pairs = tuple(pair for pair in seen.twins() if masked.isdisjoint(pair))
    reasons = []
    if pairs and route.read_by:
        are = f"{len(pairs):,} units are duplicates" if len(pairs) > 1 else "1 unit is a duplicate"
        reasons.append(f"{are}, but {route.read_by} reads it, and no weight that can be merged")
        pairs = ()
    layer = replace(
        layer, inactive=tuple(found.inactive), unread=tuple(found.unused), duplicates=pairs
    )
    shared = _sharers(layer, modules) if layer.removable else []
    if shared:
        what = f"{len(layer.removable):,} of its units look removable"
        reasons.append(f"{what}, but its weight is that of {', '.join(map(repr, shared))}, too")
        layer = replace(layer, inactive=(), unread=(), duplicates=())
    return layer, tuple(reasons)


def _sharers(layer: RemovableLayer, modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the other layers that own a parameter that makes the units of a layer."""
    own = {id(p) for p in modules[layer.name]._parameters.values() if p is not None}
    return [
        name
        for name, module in modules.items()
        if name != layer.name and any(id(p) in own for p in module._parameters.values())
    ]


def summarised(
    prover: Prover, found: Mapping[str, Found], costs: MultiplyAdds, samples: int
) -> Removable:
    """Return the record of a search.

    Args:
        prover: what is left of the candidates, and the proof.
        found: all layers that were looked at.
        costs: multiply-adds of the model.
        samples: on how many units were found.
    """
    layers = prover.layers
    cut = _Cut({name: one for name, one in layers.items() if not one.read_by}, costs)
    parameters = list(prover.beside.model.parameters())
    return Removable(
        layers={name: cut.priced(layers[name]) for name in found if name in layers},
        refused={name: "; ".join(prover.refused[name]) for name in found if name in prover.refused},
        sizes={name: one.route.units for name, one in found.items() if not one.route.is_output},
        samples=samples,
        proof=prover.proof,
        parameters=sum(parameter.numel() for parameter in parameters),
        multiply_adds=costs.whole,
        removable_parameters=cut.parameters(),
        removable_multiply_adds=cut.multiply_adds(),
    )


class _Cut:
    """The weights that go with units, each once: a weight may lose rows and columns.

    Args:
        layers: the layers with units that go.
        costs: multiply-adds of the model.
    """

    def __init__(self, layers: Mapping[str, RemovableLayer], costs: MultiplyAdds) -> None:
        self._costs = costs
        self._sizes: dict[str, int] = {}
        self._kept: dict[str, float] = {}
        for layer in layers.values():
            for part in (*layer.produced, *layer.read):
                size = 1
                for length in part.shape:
                    size *= length
                self._sizes[part.parameter] = size
                gone = len(layer.removable) * part.each / part.shape[part.dimension]
                self._kept[part.parameter] = self._kept.get(part.parameter, 1.0) * (1.0 - gone)

    def parameters(self) -> int:
        """Return how many elements of parameters go."""
        return sum(round(size * (1.0 - self._kept[name])) for name, size in self._sizes.items())

    def multiply_adds(self) -> int | None:
        """Return how many multiply-adds a sample go."""
        if self._costs.whole is None:
            return None
        weights = {name: kept for name, kept in self._kept.items() if _owner(name)[1] == "weight"}
        return round(sum(self._of(_owner(n)[0]) * (1.0 - kept) for n, kept in weights.items()))

    def priced(self, layer: RemovableLayer) -> RemovableLayer:
        """Return a layer with what its units cost by themselves."""
        count = len(layer.removable)
        parts = (*layer.produced, *layer.read)
        weights = [part for part in parts if _owner(part.parameter)[1] == "weight"]
        shares = (
            self._of(_owner(part.parameter)[0]) * count * part.each / part.shape[part.dimension]
            for part in weights
        )
        return replace(
            layer,
            parameters=count * sum(part.elements for part in parts),
            multiply_adds=None if self._costs.whole is None else round(sum(shares)),
        )

    def _of(self, layer: str) -> int:
        return self._costs.layers.get(layer, 0)


def _owner(parameter: str) -> tuple[str, str]:
    owner, _, own = parameter.rpartition(".")
    return owner, own
