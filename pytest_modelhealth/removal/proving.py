"""Proves that units can go: masks them, and compares every output on batches not used to find them.

Inactive and unread units are masked and must leave each output as it is, exactly. Duplicates go
too, the weights that read them added to those of their twins, and outputs may move by as much as
rounding explains, which is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.bare import Beside
from pytest_modelhealth.capture.step.batch import Inputs, copied_batch
from pytest_modelhealth.removal.evidence import Evidence
from pytest_modelhealth.removal.result import Proof
from pytest_modelhealth.removal.routes import Route, parameter_of
from pytest_modelhealth.report.removable import RemovableLayer
from pytest_modelhealth.tolerance import RUNS, perturbed_batch, perturbed_copy

FACTOR = 10.0
"""How many times the measured noise merged duplicates may move an output, as in a comparison."""

_SAID = {
    "inactive": ("inactive", "fires", "fire"),
    "unread": ("without a gradient", "is read", "are read"),
    "duplicates": ("equal to others", "parts from them", "part from them"),
}
"""Of each kind of candidates what they were, and what one and more of them did on held-out ones."""


class _Unit(NamedTuple):
    """A candidate: its layer, its kind, and its index or, of a duplicate, also its twin's."""

    layer: str
    kind: str
    unit: Any


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

    def propose(self, route: Route, evidence: Evidence) -> None:
        """Take the units of a layer that look removable for candidates.

        Units that are outputs of the model have to be given, whatever they are.
        """
        if route.is_output:
            return
        layer, units = route.layer, dict[str, Any](evidence.units())
        pairs = units["duplicates"]
        if pairs and layer.read_by:
            are = f"{len(pairs):,} units are duplicates" if pairs[1:] else "1 unit is a duplicate"
            reason = f"{are}, but {layer.read_by} reads it, and no weight that can be merged"
            self._refuse(layer.name, reason)
            units["duplicates"] = ()
        layer = replace(layer, samples=evidence.samples, **units)
        own = {id(p) for p in self._modules[layer.name]._parameters.values() if p is not None}
        sharers = [
            repr(name)
            for name, module in self._modules.items()
            if name != layer.name and any(id(p) in own for p in module._parameters.values())
        ]
        if layer.removable and sharers:
            what = f"{len(layer.removable):,} of its units look removable"
            self._refuse(layer.name, f"{what}, but its weight is that of {', '.join(sharers)}, too")
        elif layer.removable:
            self.layers[layer.name] = layer

    def confirm(self, evidence: Mapping[str, Evidence]) -> None:
        """Take off the candidates that do not look removable any more, with one batch more."""
        for name, layer in list(self.layers.items()):
            for kind, units in evidence[name].units().items():
                if wrong := set(getattr(layer, kind)).difference(units):
                    self._take_off(name, kind, wrong)

    def prove(self, inputs: Any, samples: int) -> None:
        """Prove the candidates on a batch of so many samples."""
        base = self._outputs(inputs, ()) if self.layers else []
        self._prove(inputs, base, self._units("inactive", "unread"), limit=0.0)
        merged = limit = 0.0
        if pairs := self._units("duplicates"):
            limit = FACTOR * rounding_noise(self._beside, inputs, base, self._epsilon)
            merged = self._prove(inputs, base, pairs, limit)
        self.proof = Proof(
            samples=self.proof.samples + samples,
            merged=max(self.proof.merged, merged),
            limit=max(self.proof.limit, limit),
        )

    def _units(self, *kinds: str) -> list[_Unit]:
        return [
            _Unit(layer.name, kind, unit)
            for layer in self.layers.values()
            for kind in kinds
            for unit in getattr(layer, kind)
        ]

    def _refuse(self, name: str, reason: str) -> None:
        self.refused.setdefault(name, {})[reason] = None

    def _take_off(self, name: str, kind: str, units: Iterable[Any], but: str = "") -> None:
        """Take units off the candidates, and keep why: what they did on held-out batches."""
        units, layer = set(units), self.layers[name]
        left: dict[str, Any] = {kind: tuple(u for u in getattr(layer, kind) if u not in units)}
        self.layers[name] = replace(layer, **left)
        if not self.layers[name].removable:
            del self.layers[name]
        was, does, do = _SAID[kind]
        what = f"1 unit was {was}" if len(units) == 1 else f"{len(units):,} units were {was}"
        but = but or f" but {does if len(units) == 1 else do} on held-out ones"
        self._refuse(name, f"{what} over {layer.samples:,} samples{but}")

    def _prove(self, inputs: Any, base: list[Tensor], units: list[_Unit], limit: float) -> float:
        """Take off the units without which an output moves further than the limit.

        Returns:
            How far outputs move without the others.
        """
        masked = self._units("inactive", "unread") if limit else []  # these are proven before
        moved = self._moved(inputs, base, [*masked, *units]) if units else 0.0
        if moved <= limit:
            return moved
        if not limit and self._moved(inputs, base, ()):
            for name in self.layers:
                reason = "the same batch gives another output each time, so nothing is proven"
                self._refuse(name, reason)
            self.layers.clear()
            return 0.0
        bad, parts = dict[_Unit, float](), [units]
        while parts:  # by halving
            part = parts.pop()
            by = self._moved(inputs, base, part)
            if by > limit and len(part) == 1:
                bad[part[0]] = by
            elif by > limit:
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]
        left = [unit for unit in units if unit not in bad]
        moved = self._moved(inputs, base, [*masked, *left])
        if moved > limit:  # only together
            bad |= dict.fromkeys(left, moved)
            moved = 0.0
        for name, kind in dict.fromkeys(unit[:2] for unit in bad):
            here = {unit.unit: by for unit, by in bad.items() if unit[:2] == (name, kind)}
            by = max(here.values())
            but = f", but masking moves an output by {by:.3g}"
            if limit:
                but = (
                    f", but merged into them they move an output by {by:.3g} of its size, and "
                    f"rounding explains {limit:.3g}"
                )
            self._take_off(name, kind, here, but)
        return moved

    def _moved(self, inputs: Any, base: list[Tensor], units: Sequence[_Unit]) -> float:
        """Return how far outputs move without these; with duplicates: of the outputs' size."""
        is_merged = any(unit.kind == "duplicates" for unit in units)
        return largest_difference(base, self._outputs(inputs, units), relative=is_merged)

    def _outputs(self, inputs: Any, units: Sequence[_Unit]) -> list[Tensor]:
        """Return what the model returns without some units."""
        batch = Inputs.of(copied_batch(inputs))
        with self._beside.put_back((batch.args, batch.kwargs), evaluation=True), torch.no_grad():
            for unit in units:
                self._mask(*unit)
            output = batch.call(self._beside.model)
            return [tensor.detach().clone() for tensor in find_tensors(output)]

    def _mask(self, layer: str, kind: str, unit: Any) -> None:
        """Set to zero what makes a unit; what reads a duplicate reads its twin."""
        is_duplicate = kind == "duplicates"
        unit, twin = unit if is_duplicate else (unit, unit)
        for part in self.layers[layer].read if is_duplicate else ():
            tensor = parameter_of(part.parameter, self._modules)
            source = tensor.narrow(part.dimension, unit * part.each, part.each)
            tensor.narrow(part.dimension, twin * part.each, part.each).add_(source)
            source.zero_()
        for part in self.layers[layer].produced:
            tensor = parameter_of(part.parameter, self._modules)
            tensor.narrow(part.dimension, unit * part.each, part.each).zero_()


def rounding_noise(beside: Beside, inputs: Any, base: Sequence[Tensor], epsilon: float) -> float:
    """Return how far rounding alone moves an output, of its size: perturbed copies."""
    noise = epsilon
    for seed in range(RUNS):
        copy = perturbed_copy(beside.model, epsilon, seed)
        batch = Inputs.of(perturbed_batch(inputs, epsilon, seed))
        with beside.put_back((batch.args, batch.kwargs), evaluation=True), torch.no_grad():
            outputs = find_tensors(batch.call(copy.eval()))
        # rounding moves these by a little, while an index may jump
        smooth = [t.is_floating_point() or t.is_complex() for t in base]
        sides = [[t for t, s in zip(side, smooth, strict=False) if s] for side in (base, outputs)]
        ours, theirs = sides if any(smooth) else (base, outputs)
        noise = max(noise, largest_difference(ours, theirs, relative=True))
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
    most = 0.0
    for a, b in zip(ours, theirs, strict=True):
        if torch.equal(a, b) or not a.numel():
            continue
        a, b = (t.dequantize() if t.is_quantized else t for t in (a, b))
        wide = torch.complex128 if a.is_complex() else torch.float64
        a, b = a.to(wide), b.to(wide)
        same = torch.isclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
        largest = float(torch.where(same, 0.0, (a - b).abs()).nan_to_num(float("inf")).max())
        size = float(a.abs().nan_to_num(0.0, posinf=0.0).max()) if relative else 1.0
        most = max(most, largest / size if size else largest)
    return most
