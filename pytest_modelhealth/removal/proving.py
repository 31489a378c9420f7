"""Proves that units can go: masks them, and compares every output on batches not used to find them.

Inactive and unread units are masked and must leave each output as it is, exactly. Duplicates go
too, the weights that read them added to those of their twins, and outputs may move by as much as
rounding explains, which is measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.bare import Beside
from pytest_modelhealth.capture.step.batch import Inputs, copied_batch
from pytest_modelhealth.removal.finding import Found
from pytest_modelhealth.removal.masking import apply_masks
from pytest_modelhealth.report.removable import Proof, RemovableLayer
from pytest_modelhealth.tolerance import RUNS, perturbed_batch, perturbed_copy

FACTOR = 10.0
"""How many times the measured noise merged duplicates may move an output, as in a comparison."""

Kind = Literal["inactive", "unread"]
Layers = dict[str, RemovableLayer]


@dataclass
class Prover:
    """Proves candidates, batch by batch; what fails is taken off them, and the reason kept.

    Args:
        beside: the model, to be run again and again.
        modules: its layers by name.
        layers: the candidates.
        epsilon: machine epsilon of the model.

    Attributes:
        refused: by layer, why units are no candidates any longer, phrases.
        proof: what was measured.
    """

    beside: Beside
    modules: Mapping[str, nn.Module]
    layers: Layers
    epsilon: float
    refused: dict[str, list[str]] = field(default_factory=dict)
    proof: Proof = field(default_factory=Proof)

    def refuse(self, name: str, reason: str) -> None:
        """Keep a reason why units of a layer cannot go."""
        reasons = self.refused.setdefault(name, [])
        if reason not in reasons:
            reasons.append(reason)

    def add(self, inputs: Any, found: Mapping[str, Found], samples: int) -> None:
        """Prove the candidates on one more batch.

        Args:
            inputs: the batch.
            found: what it says itself of the units of each layer.
            samples: how many it has.
        """
        for name, layer in list(self.layers.items()):
            if name in found:
                self._keep(name, self._confirmed(layer, found[name]))
        base = self._outputs(inputs, {}) if self.layers else []
        self._prove_masked(inputs, base)
        merged, limit = self._prove_merged(inputs, base)
        self.proof = Proof(
            samples=self.proof.samples + samples,
            merged=max(self.proof.merged, merged),
            limit=max(self.proof.limit, limit),
        )

    def _keep(self, name: str, layer: RemovableLayer) -> None:
        self.layers[name] = layer
        if not layer.removable:
            del self.layers[name]

    def _confirmed(self, layer: RemovableLayer, found: Found) -> RemovableLayer:
        """Return what a batch says, too, of the candidates of a layer."""
        zero, untouched = set(found.inactive), {*found.inactive, *found.unused}
        twins = dict(found.seen.twins())
        inactive = tuple(u for u in layer.inactive if u in zero)
        unread = tuple(u for u in layer.unread if u in untouched)
        same = tuple(
            pair for pair in layer.duplicates if _share(pair, twins) or zero.issuperset(pair)
        )
        over = f"over {layer.samples:,} samples"
        for before, after, said in (
            (layer.inactive, inactive, "inactive {over} but {fire} on held-out ones"),
            (layer.unread, unread, "unread {over} but {are} read on held-out ones"),
            (layer.duplicates, same, "equal to others {over} but {part} on held-out ones"),
        ):
            if lost := len(before) - len(after):
                words = said.format(over=over, **_verbs(lost))
                self.refuse(layer.name, f"{_units(lost)} {_was(lost)} {words}")
        return replace(layer, inactive=inactive, unread=unread, duplicates=same)

    def _prove_masked(self, inputs: Any, base: list[Tensor]) -> None:
        """Take off what changes an output: what is left changes none, exactly."""
        if not any(layer.masked for layer in self.layers.values()):
            return
        if self._difference(inputs, base, self.layers) == 0.0:
            return
        if self._difference(inputs, base, {}) != 0.0:
            self._refuse_all("the same batch gives another output each time, so nothing is proven")
            return
        for name, layer in list(self.layers.items()):
            self._sort_out(inputs, base, layer, "inactive", layer.inactive)
            if name in self.layers:
                self._sort_out(inputs, base, self.layers[name], "unread", layer.unread)
        difference = self._difference(inputs, base, self.layers)
        if difference != 0.0:
            self._refuse_all(f"masked together, they move an output by {difference:.3g}")

    def _sort_out(
        self,
        inputs: Any,
        base: list[Tensor],
        layer: RemovableLayer,
        kind: Kind,
        units: tuple[int, ...],
    ) -> None:
        """Take off the units of a kind that change an output, found by halving."""
        bad: list[int] = []
        most = 0.0
        todo = [units] if units else []
        while todo:
            some = todo.pop()
            alone = _with(replace(layer, inactive=(), unread=(), duplicates=()), kind, some)
            difference = self._difference(inputs, base, {layer.name: alone})
            if difference == 0.0:
                continue
            if len(some) == 1:
                bad += some
                most = max(most, difference)
            else:
                middle = len(some) // 2
                todo += [some[:middle], some[middle:]]
        if bad:
            left = tuple(unit for unit in units if unit not in bad)
            self._keep(layer.name, _with(layer, kind, left))
            said = "inactive" if kind == "inactive" else "without a gradient"
            self.refuse(
                layer.name,
                f"{_units(len(bad))} {_was(len(bad))} {said} over {layer.samples:,} samples, but "
                f"masking moves an output by {most:.3g}",
            )

    def _prove_merged(self, inputs: Any, base: list[Tensor]) -> tuple[float, float]:
        """Take off duplicates that change an output by more than rounding does.

        Returns:
            By how much the rest does, and the limit, both relative.
        """
        doubled = {name: layer for name, layer in self.layers.items() if layer.duplicates}
        if not doubled:
            return 0.0, 0.0
        limit = FACTOR * rounding_noise(self.beside, inputs, base, self.epsilon)
        moved = self._relative(inputs, base, self.layers)
        if moved <= limit:
            return moved, limit
        for name, layer in doubled.items():
            alone = replace(layer, inactive=(), unread=())
            if (moved := self._relative(inputs, base, {name: alone})) > limit:
                self._refuse_duplicates(layer, moved, limit)
        moved = self._relative(inputs, base, self.layers)
        if moved > limit:
            for layer in [layer for layer in self.layers.values() if layer.duplicates]:
                self._refuse_duplicates(layer, moved, limit)
            moved = 0.0
        return moved, limit

    def _refuse_duplicates(self, layer: RemovableLayer, moved: float, limit: float) -> None:
        count = len(layer.duplicates)
        self.refuse(
            layer.name,
            f"{_units(count)} {_was(count)} equal to others over {layer.samples:,} samples, but "
            f"merged into them they move an output by {moved:.3g} of its size, and rounding "
            f"explains {limit:.3g}",
        )
        self._keep(layer.name, replace(layer, duplicates=()))

    def _refuse_all(self, reason: str) -> None:
        for name in list(self.layers):
            self.refuse(name, reason)
            del self.layers[name]

    def _outputs(self, inputs: Any, layers: Layers, *, merged: bool = False) -> list[Tensor]:
        """Return what the model returns with units masked, and merged maybe."""
        batch = Inputs.of(copied_batch(inputs))
        with self.beside.put_back((batch.args, batch.kwargs), evaluation=True), torch.no_grad():
            apply_masks(layers, self.modules, merged=merged)
            output = self.beside.model(*batch.args, **batch.kwargs)
            return [tensor.detach().clone() for tensor in find_tensors(output)]

    def _difference(self, inputs: Any, base: list[Tensor], layers: Layers) -> float:
        return largest_difference(base, self._outputs(inputs, layers))

    def _relative(self, inputs: Any, base: list[Tensor], layers: Layers) -> float:
        return largest_difference(base, self._outputs(inputs, layers, merged=True), relative=True)


def rounding_noise(beside: Beside, inputs: Any, base: Sequence[Tensor], epsilon: float) -> float:
    """Return how far rounding alone moves an output, of its size: perturbed copies.

    Args:
        beside: the model.
        inputs: a batch.
        base: what the model returns for it.
        epsilon: machine epsilon of the model.
    """
    noise = epsilon
    for seed in range(RUNS):
        copy = perturbed_copy(beside.model, epsilon, seed)
        batch = Inputs.of(perturbed_batch(inputs, epsilon, seed))
        with beside.put_back((batch.args, batch.kwargs), evaluation=True), torch.no_grad():
            outputs = find_tensors(copy.eval()(*batch.args, **batch.kwargs))
        moved = largest_difference(floating(base), floating(outputs), relative=True)
        noise = max(noise, moved)
    return noise


def floating(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return those that rounding moves by a little: an index may jump. All, where there is none."""
    found = [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]
    return found or tensors


def largest_difference(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], *, relative: bool = False
) -> float:
    """Return the largest difference of an element; infinite where tensors have another form.

    Args:
        ours, theirs: tensors in the same order. NaN beside NaN is no difference.
        relative: to the largest magnitude of the tensor in `ours`.
    """
    if len(ours) != len(theirs):
        return float("inf")
    return max(
        (_difference(a, b, relative) for a, b in zip(ours, theirs, strict=True)), default=0.0
    )


def _difference(ours: Tensor, theirs: Tensor, relative: bool) -> float:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    if torch.equal(ours, theirs) or not ours.numel():
        return 0.0
    if ours.is_quantized:
        ours, theirs = ours.dequantize(), theirs.dequantize()
    wide = torch.complex128 if ours.is_complex() else torch.float64
    ours, theirs = ours.to(wide), theirs.to(wide)
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    gap = torch.where(same, 0.0, (ours - theirs).abs()).nan_to_num(float("inf"))
    size = ours.abs().nan_to_num(0.0, posinf=0.0).max() if relative else torch.tensor(1.0)
    largest = float(gap.max())
    return largest / float(size) if largest and float(size) else largest


def _with(layer: RemovableLayer, kind: Kind, units: tuple[int, ...]) -> RemovableLayer:
    """Return a layer with other units of a kind."""
    if kind == "inactive":
        return replace(layer, inactive=units)
    return replace(layer, unread=units)


def _share(pair: tuple[int, int], twins: Mapping[int, int]) -> bool:
    """Whether two units have the same values, of which each may be said to be a third one's."""
    one, other = (twins.get(unit, unit) for unit in pair)
    return one == other


def _units(count: int) -> str:
    return f"{count:,} unit" if count == 1 else f"{count:,} units"


def _was(count: int) -> str:
    return "was" if count == 1 else "were"


def _verbs(count: int) -> dict[str, str]:
    if count == 1:
        return {"fire": "fires", "are": "is", "part": "parts from them"}
    return {"fire": "fire", "are": "are", "part": "part from them"}
