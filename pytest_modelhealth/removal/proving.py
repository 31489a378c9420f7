"""Proves that units can go: masks them, and compares every output on batches not used to find them.

Inactive and unread units are masked and must leave each output as it is, exactly. Duplicates go
too, the weights that read them added to those of their twins, and outputs may move by as much as
rounding explains, which is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.bare import Beside
from pytest_modelhealth.capture.step.batch import Inputs, copied_batch
from pytest_modelhealth.removal.evidence import Evidence, parameter_of
from pytest_modelhealth.removal.routes import Route
from pytest_modelhealth.report.removable import Proof, RemovableLayer
from pytest_modelhealth.tolerance import RUNS, perturbed_batch, perturbed_copy

FACTOR = 10.0
"""How many times the measured noise merged duplicates may move an output, as in a comparison."""

Layers = Mapping[str, RemovableLayer]
_EXACT = ("inactive", "unread")
_WAS = {"inactive": "inactive", "unread": "without a gradient", "duplicates": "equal to others"}


class _Part(NamedTuple):
    """Units of one layer and kind that are masked or not as a whole."""

    layer: str
    kind: str
    units: tuple[Any, ...]


class Prover:
    """Proves candidates, batch by batch; what fails is taken off them, and the reason kept.

    Args:
        beside: the model, to be run again and again.
        modules: its layers by name.
        epsilon: machine epsilon of the model.

    Attributes:
        layers: the candidates, by name.
        refused: by layer, why units are no candidates any longer, phrases.
        proof: what was measured.
    """

    def __init__(self, beside: Beside, modules: Mapping[str, nn.Module], epsilon: float) -> None:
        self._beside, self._modules, self._epsilon = beside, modules, epsilon
        self.layers: dict[str, RemovableLayer] = {}
        self.refused: dict[str, dict[str, None]] = {}
        self.proof = Proof()

    def propose(self, route: Route, found: Evidence) -> None:
        """Take the units of a layer that look removable for candidates.

        Units that are outputs of the model have to be given, whatever they are.
        """
        if route.is_output:
            return
        layer, masked = route.layer, {*found.inactive, *found.unused}
        pairs = tuple(pair for pair in found.twins() if masked.isdisjoint(pair))
        if pairs and layer.read_by:
            count = len(pairs)
            are = f"{count:,} units are duplicates" if count > 1 else "1 unit is a duplicate"
            reason = f"{are}, but {layer.read_by} reads it, and no weight that can be merged"
            self._refuse(layer.name, reason)
            pairs = ()
        layer = replace(
            layer,
            samples=found.samples,
            inactive=found.inactive,
            unread=found.unused,
            duplicates=pairs,
        )
        own = {id(p) for p in self._modules[layer.name]._parameters.values() if p is not None}
        sharers = [
            repr(name)
            for name, module in self._modules.items()
            if name != layer.name and any(id(p) in own for p in module._parameters.values())
        ]
        if layer.removable and sharers:
            what = f"{len(layer.removable):,} of its units look removable"
            self._refuse(layer.name, f"{what}, but its weight is that of {', '.join(sharers)}, too")
        else:
            self._keep(layer)

    def add(self, inputs: Any, found: Mapping[str, Evidence], samples: int) -> None:
        """Prove the candidates on one more batch.

        Args:
            inputs: the batch.
            found: what it says itself of the units of each layer.
            samples: how many it has.
        """
        for name, layer in list(self.layers.items()):
            if name in found:
                self._confirm(layer, found[name])
        base = self._outputs(inputs, {}) if self.layers else []
        self._prove_masked(inputs, base)
        merged, limit = self._prove_merged(inputs, base)
        self.proof = Proof(
            samples=self.proof.samples + samples,
            merged=max(self.proof.merged, merged),
            limit=max(self.proof.limit, limit),
        )

    def _refuse(self, name: str, reason: str) -> None:
        self.refused.setdefault(name, {})[reason] = None

    def _keep(self, layer: RemovableLayer) -> None:
        self.layers[layer.name] = layer
        if not layer.removable:
            del self.layers[layer.name]

    def _take_off(self, part: _Part, but: str) -> None:
        """Take units off the candidates, and keep why."""
        layer, count = self.layers[part.layer], len(part.units)
        left = tuple(unit for unit in getattr(layer, part.kind) if unit not in part.units)
        self._keep(_with(layer, {part.kind: left}))
        was = f"{count:,} unit was" if count == 1 else f"{count:,} units were"
        over = f"over {layer.samples:,} samples"
        self._refuse(part.layer, f"{was} {_WAS[part.kind]} {over}{but}")

    def _confirm(self, layer: RemovableLayer, found: Evidence) -> None:
        """Take off the candidates of a layer of which a batch says otherwise."""
        zero, twins = set(found.inactive), dict(found.twins())
        alive = tuple(unit for unit in layer.inactive if unit not in zero)
        is_read = tuple(unit for unit in layer.unread if unit not in zero | set(found.unused))
        # two units with the same values may each be said to be a third one's twin
        apart = tuple(
            (one, other)
            for one, other in layer.duplicates
            if twins.get(one, one) != twins.get(other, other) and not zero.issuperset((one, other))
        )
        one, more = ("fires", "is read", "parts from them"), ("fire", "are read", "part from them")
        kinds = ("inactive", "unread", "duplicates")
        for kind, units, verb, verbs in zip(kinds, (alive, is_read, apart), one, more, strict=True):
            if units and layer.name in self.layers:
                said = verb if len(units) == 1 else verbs
                self._take_off(_Part(layer.name, kind, units), f" but {said} on held-out ones")

    def _masked(self) -> list[_Part]:
        """Return the units that go by being masked alone, each by itself."""
        return [
            _Part(layer.name, kind, (unit,))
            for layer in self.layers.values()
            for kind in _EXACT
            for unit in getattr(layer, kind)
        ]

    def _prove_masked(self, inputs: Any, base: list[Tensor]) -> None:
        """Take off what changes an output: what is left changes none, exactly."""
        parts = self._masked()
        if not parts or self._moved(inputs, base, parts) == 0.0:
            return
        reason = "the same batch gives another output each time, so nothing is proven"
        if self._moved(inputs, base, []) == 0.0:
            bad = self._harmful(inputs, base, parts)
            for name, kind in dict.fromkeys((part.layer, part.kind) for part, _ in bad):
                here = [one for one in bad if one[0][:2] == (name, kind)]
                units = tuple(part.units[0] for part, _ in here)
                most = max(moved for _, moved in here)
                said = f", but masking moves an output by {most:.3g}"
                self._take_off(_Part(name, kind, units), said)
            left = [part for part in parts if part not in [one for one, _ in bad]]
            if not (moved := self._moved(inputs, base, left)):
                return
            reason = f"masked together, they move an output by {moved:.3g}"
        for name in list(self.layers):
            self._refuse(name, reason)
            del self.layers[name]

    def _prove_merged(self, inputs: Any, base: list[Tensor]) -> tuple[float, float]:
        """Take off duplicates that change an output by more than rounding does.

        Returns:
            By how much the rest does, and the limit, both relative.
        """
        doubled = [layer for layer in self.layers.values() if layer.duplicates]
        if not doubled:
            return 0.0, 0.0
        parts = [_Part(layer.name, "duplicates", layer.duplicates) for layer in doubled]
        limit = FACTOR * rounding_noise(self._beside, inputs, base, self._epsilon)
        moved = self._moved(inputs, base, [*self._masked(), *parts])
        if moved <= limit:
            return moved, limit
        bad = self._harmful(inputs, base, parts, limit)
        left = [part for part in parts if part not in [one for one, _ in bad]]
        moved = self._moved(inputs, base, [*self._masked(), *left])
        if moved > limit:
            bad += [(part, moved) for part in left]
            moved = 0.0
        for part, by in bad:
            self._take_off(
                part,
                f", but merged into them they move an output by {by:.3g} of its size, and "
                f"rounding explains {limit:.3g}",
            )
        return moved, limit

    def _harmful(
        self, inputs: Any, base: list[Tensor], parts: list[_Part], limit: float = 0.0
    ) -> list[tuple[_Part, float]]:
        """Return the parts that move an output further than that, and how far: by halving."""
        bad, todo = [], [parts]
        while todo:
            some = todo.pop()
            moved = self._moved(inputs, base, some)
            if moved > limit and len(some) == 1:
                bad.append((some[0], moved))
            elif moved > limit:
                middle = len(some) // 2
                todo += [some[middle:], some[:middle]]
        return bad

    def _moved(self, inputs: Any, base: list[Tensor], parts: Sequence[_Part]) -> float:
        """Return how far outputs move with these parts gone; duplicates: of the outputs' size."""
        layers: dict[str, RemovableLayer] = {}
        for name, kind, units in parts:
            layer = layers.get(name) or _with(self.layers[name], _NONE)
            layers[name] = _with(layer, {kind: (*getattr(layer, kind), *units)})
        is_merged = any(layer.duplicates for layer in layers.values())
        return largest_difference(base, self._outputs(inputs, layers), relative=is_merged)

    def _outputs(self, inputs: Any, layers: Layers) -> list[Tensor]:
        """Return what the model returns without the units of some layers."""
        batch = Inputs.of(copied_batch(inputs))
        with self._beside.put_back((batch.args, batch.kwargs), evaluation=True), torch.no_grad():
            mask(layers, self._modules)
            output = self._beside.model(*batch.args, **batch.kwargs)
            return [tensor.detach().clone() for tensor in find_tensors(output)]


_NONE: Mapping[str, tuple[Any, ...]] = {"inactive": (), "unread": (), "duplicates": ()}


def _with(layer: RemovableLayer, units: Mapping[str, tuple[Any, ...]]) -> RemovableLayer:
    """Return a layer with other units of some kinds."""
    changes: dict[str, Any] = dict(units)
    return replace(layer, **changes)


def mask(layers: Layers, modules: Mapping[str, nn.Module]) -> None:
    """Set to zero what makes the units of some layers; what reads duplicates reads their twins."""
    for layer in layers.values():
        for part in layer.read:
            tensor = parameter_of(part.parameter, modules)
            for unit, twin in layer.duplicates:
                source = tensor.narrow(part.dimension, unit * part.each, part.each)
                tensor.narrow(part.dimension, twin * part.each, part.each).add_(source)
                source.zero_()
        for part in layer.produced:
            tensor = parameter_of(part.parameter, modules)
            where = torch.tensor(part.indices(layer.removable), device=tensor.device)
            tensor.index_fill_(part.dimension, where.long(), 0)


def rounding_noise(beside: Beside, inputs: Any, base: Sequence[Tensor], epsilon: float) -> float:
    """Return how far rounding alone moves an output, of its size: perturbed copies.

    Args:
        beside: the model.
        inputs: a batch.
        base: what the model returns for it.
        epsilon: machine epsilon of the model.
    """

    def floating(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return those that rounding moves by a little: an index may jump. All, without any."""
        return [t for t in tensors if t.is_floating_point() or t.is_complex()] or tensors

    noise = epsilon
    for seed in range(RUNS):
        copy = perturbed_copy(beside.model, epsilon, seed)
        batch = Inputs.of(perturbed_batch(inputs, epsilon, seed))
        with beside.put_back((batch.args, batch.kwargs), evaluation=True), torch.no_grad():
            outputs = find_tensors(copy.eval()(*batch.args, **batch.kwargs))
        moved = largest_difference(floating(base), floating(outputs), relative=True)
        noise = max(noise, moved)
    return noise


def largest_difference(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], *, relative: bool = False
) -> float:
    """Return the largest difference of an element; infinite where tensors have another form.

    Args:
        ours, theirs: tensors in the same order. NaN beside NaN is no difference.
        relative: to the largest magnitude of the tensor in `ours`.
    """
    if [(t.shape, t.dtype) for t in ours] != [(t.shape, t.dtype) for t in theirs]:
        return float("inf")
    pairs = zip(ours, theirs, strict=True)
    return max((_difference(a, b, relative) for a, b in pairs), default=0.0)


def _difference(ours: Tensor, theirs: Tensor, relative: bool) -> float:
    if torch.equal(ours, theirs) or not ours.numel():
        return 0.0
    if ours.is_quantized:
        ours, theirs = ours.dequantize(), theirs.dequantize()
    wide = torch.complex128 if ours.is_complex() else torch.float64
    ours, theirs = ours.to(wide), theirs.to(wide)
    same = torch.isclose(ours, theirs, rtol=0.0, atol=0.0, equal_nan=True)
    largest = float(torch.where(same, 0.0, (ours - theirs).abs()).nan_to_num(float("inf")).max())
    size = float(ours.abs().nan_to_num(0.0, posinf=0.0).max()) if relative else 1.0
    return largest / size if size else largest
