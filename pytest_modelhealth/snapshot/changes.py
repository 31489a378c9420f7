"""What became of the layers and tensors of one snapshot in another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import torch

from pytest_modelhealth.alignment.causes import Causes
from pytest_modelhealth.alignment.matching import align
from pytest_modelhealth.alignment.result import Alignment, Change, Pair
from pytest_modelhealth.capture.observing.tensors import TensorStore
from pytest_modelhealth.comparison.trace import KeptTensor, Key, Trace, TwoRuns
from pytest_modelhealth.snapshot.snapshot import Snapshot
from pytest_modelhealth.tolerance import TensorName

_STAGES = (
    ("inputs",),
    ("parameters",),
    ("buffers", "inputs", "activations"),
    ("loss",),
    ("gradients", "parameter_gradients"),
)
"""A run from its causes to its effects, and in each stage the roles of a layer likewise. Only in
the last do later layers come first. The inputs of the first stage are those of the model. Buffers
may be either: a batch norm's follow earlier layers."""


def stage(role: str, layer: str, place: Mapping[str, int]) -> tuple[int, int, int]:
    """Return a key that sorts tensors from causes to effects, by the order of returning layers."""
    position = place.get(layer, -1)
    stages = range(1, len(_STAGES)) if role == "inputs" and layer else range(5)
    at = next(i for i in stages if role in _STAGES[i])
    return at, -position if at == len(_STAGES) - 1 else position, _STAGES[at].index(role)


@dataclass(frozen=True)
class LayerChange:
    """What became of a layer, or of a tensor of it."""

    what: str  # ``"renamed"``, ``"added"``, ``"no gradients any more of"``
    label: str  # the layer or tensor for people
    rest: str = ""  # the rest of the phrase
    layer: str = ""  # name of the layer
    # whether it fails by itself: no number tells what it does to another batch or to training
    fails: bool = False


class SnapshotPair:
    """The layers and tensors of two snapshots side by side; they are aligned when asked for."""

    def __init__(self, before: Snapshot, now: Snapshot) -> None:
        self.old, self.new = before, now

    @cached_property
    def of_one_form(self) -> bool:
        """Whether all but the numbers is the same, so that each layer is the one of its name."""
        form = attrgetter("name", "type_name", "status", "calls", "tied")
        old, new = (
            [
                (form(one), [p.shape for p in one.parameters.values()])
                for one in side.layers.values()
            ]
            for side in (self.old, self.new)
        )
        return old == new and all(
            list(self.old.tensors[name]) == list(self.new.tensors[name]) for name in self.old.layers
        )

    @cached_property
    def alignment(self) -> Alignment:
        """Which layer is which."""
        return align(self.old.layers, self.new.layers)

    @cached_property
    def runs(self) -> TwoRuns:
        """Both as runs that show their tensors from causes to effects."""
        traces = []
        for side in (self.old, self.new):
            shapes: dict[Key, tuple[tuple[int, ...], torch.dtype]] = {}
            for layer, record in side.layers.items():
                for (_, role, own), seen in side.tensors[layer].items():
                    times = max(record.calls, 1) if role in ("inputs", "activations") else 1
                    dtype = getattr(torch, seen.dtype, torch.float32)
                    shapes |= {Key(layer, role, own, n): (seen.shape, dtype) for n in range(times)}
            keys = sorted(shapes, key=lambda key: stage(key.role, key.layer, side.place))
            entries = {key: KeptTensor(at, at, *shapes[key]) for at, key in enumerate(keys)}
            traces.append(Trace(side.observation, entries, ""))
        return TwoRuns(traces[0], traces[1], self.alignment, ({}, {}), TensorStore(0))

    @cached_property
    def causes(self) -> Causes:
        """What became of calls and ties."""
        return Causes(self.alignment)

    @property
    def has_common_layers(self) -> bool:
        """Whether any layer but the models themselves is on both sides."""
        return any(self.alignment.to_candidate) or len(self.old.layers) <= 1

    def tensors(self) -> Iterator[tuple[TensorName, TensorName]]:
        """Yield the names in the snapshot and in the report of every tensor that both have."""
        for layer in self.new.layers:
            pair = None if self.of_one_form else self.alignment.by_candidate[layer]
            origin = layer if pair is None else pair.reference
            if origin is None or (pair is not None and pair.is_folded):
                continue
            host = None if pair is None else pair.output_of
            for now in self.new.tensors[layer]:
                _, role, own = now
                if host is not None and role in ("activations", "gradients"):
                    before = host, role, own
                elif host is None or role == "inputs":
                    before = origin, role, own
                else:
                    continue
                if before in self.old.tensors[before[0]]:
                    yield before, now

    @cached_property
    def shows_output(self) -> bool:
        """Whether what the model returns is on both sides, so that numbers tell of its layers."""
        models = [side.layers.get("") for side in (self.old, self.new)]
        return all(model is not None and model.activations is not None for model in models)

    def changes(self) -> Iterator[LayerChange]:
        """Yield what became of each layer that is not what it was."""
        for pair in self.alignment.pairs:
            if pair.reference is not None and pair.candidate is not None:
                yield from self._changed(pair, pair.reference, pair.candidate)
            else:
                yield self._on_one_side(pair)

    @cached_property
    def _only(self) -> tuple[dict[str, list[TensorName]], dict[str, list[TensorName]]]:
        """The tensors of each layer of a side of which the other has none of their name."""
        to = self.alignment.to_candidate
        back = {y: x for x, y in to.items()}
        lost, gained = (
            {
                name: [
                    key
                    for key in one.tensors[name]
                    if name not in names
                    or (names[name], *key[1:]) not in other.tensors[names[name]]
                ]
                for name in one.layers
            }
            for one, other, names in ((self.old, self.new, to), (self.new, self.old, back))
        )
        return lost, gained

    def _have_parameters(self, side: int) -> bool:
        """Whether parameters are on one side only, which may have taken the place of others."""
        return any(key[1] == "parameters" for keys in self._only[side].values() for key in keys)

    def _on_one_side(self, pair: Pair) -> LayerChange:
        is_new, name = pair.reference is None, pair.name
        side = self.new if is_new else self.old
        record = side.layers[name]
        is_split = any(name in (one.whole, *one.parts) for one in self.alignment.splits)
        is_idle = pair.is_folded or is_split or not side.computes(name)
        is_formal = not record.parameters or self._have_parameters(0 if is_new else 1)
        rest = f" ({', '.join(filter(None, (record.type_name, pair.note)))})"
        fails = not (is_idle or (is_formal and self.shows_output))
        return LayerChange("added" if is_new else "removed", side.label(name), rest, name, fails)

    def _changed(self, pair: Pair, reference: str, candidate: str) -> Iterator[LayerChange]:
        before, now = self.old.layers[reference], self.new.layers[candidate]
        old_label, label = self.old.label(reference), self.new.label(candidate)
        if reference != candidate:
            yield LayerChange("renamed", old_label, f" to {label}")
        if pair.change is Change.MOVED:
            yield LayerChange("moved", old_label, " to another place among the layers", candidate)
        if before.type_name != now.type_name:
            yield LayerChange("changed", label, f": type {before.type_name} is now {now.type_name}")
        if pair.is_folded or pair.folded_in:
            yield LayerChange("changed", label, f": {pair.note}")
            return
        lost = list(self._tensors_come_and_gone(reference, candidate))
        altered = self.causes.phrases[reference] or ", ".join(
            f"{name} {getattr(before, name)} is now {getattr(now, name)}"
            for name in ("status", "calls")
            if getattr(before, name) != getattr(now, name)
        )
        if not altered:
            yield from [LayerChange("changed", label, f": {pair.note}")] if pair.note else ()
            yield from lost
            return
        sides = ((self.old, reference), (self.new, candidate))
        is_idle = not any(side.computes(name) for side, name in sides) or all(
            name in side.holders and not side.layers[name].parameters for side, name in sides
        )
        is_formal = bool(candidate) and self.shows_output and not any(one.fails for one in lost)
        fails = not (is_idle or is_formal)
        yield LayerChange("changed", label, f": {altered}", candidate, fails)

    def _tensors_come_and_gone(self, reference: str, candidate: str) -> Iterator[LayerChange]:
        ties = {one.parameter: one for one in self.causes.ties if one.pair.candidate == candidate}
        for tie in ties.values():
            yield LayerChange("changed", tie.label, f": {tie.phrase}", candidate, fails=True)
        lost, gained = self._only
        # the inputs of inner layers only serve the story
        for _, role, own in lost[reference]:
            if own not in ties and not (role == "inputs" and reference):
                label = self.old.label(reference, own)
                roles = {role for _, role, _ in lost[reference]}
                # every number may be as it was without a tensor, but not where nothing takes the
                # place of a parameter, or one that is still there has no gradient
                may_go = {
                    "parameters": self._have_parameters(1),
                    "parameter_gradients": own not in self.new.layers[candidate].parameters,
                    "buffers": not own.startswith(("running_", "num_batches")),
                }
                is_formal = bool(reference) and may_go.get(role, "parameter_gradients" not in roles)
                fails = not (is_formal and self.shows_output)
                yield LayerChange(f"no {role} any more of", label, "", candidate, fails)
        for _, role, own in gained[candidate]:
            if own not in ties and not (role == "inputs" and candidate):
                is_formal = "parameter" not in role or self._have_parameters(0)
                label, fails = self.new.label(candidate, own), not (is_formal and self.shows_output)
                yield LayerChange(f"new {role} of", label, "", candidate, fails)


def phrases(changes: Iterable[LayerChange]) -> list[str]:
    """Return a phrase for each kind of change, as one cause often changes every layer alike."""
    groups: dict[tuple[str, str], list[LayerChange]] = {}
    for change in changes:
        rest = "" if change.what == "renamed" else change.rest
        groups.setdefault((change.what, rest), []).append(change)
    found = []
    for (what, rest), (first, *others) in groups.items():
        more = f" and {len(others)} more" if others else ""
        label = first.label if rest else f"{first.label}{first.rest}"
        found.append(f"{what} {label}{more}{rest}")
    return found
