"""What became of the layers and tensors of one snapshot in another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from pytest_modelhealth.alignment.matching import align
from pytest_modelhealth.alignment.result import Causes, Change, Pair
from pytest_modelhealth.capture.observing.tensors import TensorStore
from pytest_modelhealth.comparison.runs import KeptTensor, Key, Trace, TwoRuns
from pytest_modelhealth.report import UNCALLED, Status
from pytest_modelhealth.snapshot.snapshot import Snapshot, shown
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
    """The layers and tensors of two snapshots side by side."""

    def __init__(self, before: Snapshot, now: Snapshot) -> None:
        self.old, self.new = before, now
        self.alignment = align(before.layers, now.layers)  # which layer is which
        self.causes = Causes(self.alignment)  # what became of calls and ties
        # Whether any layer but the models themselves is on both sides.
        self.has_common_layers = any(self.alignment.to_candidate) or len(before.layers) <= 1
        models = [side.layers.get("") for side in (before, now)]
        # Whether what the model returns is on both sides, so that numbers tell of its layers.
        self.shows_output = all(one is not None and one.activations is not None for one in models)
        known = [{pair[side] for pair in self.tensors} for side in (0, 1)]
        # The tensors of each layer of a side of which the other has none of their name.
        self._lost, self._gained = (
            {name: [key for key in side.tensors[name] if key not in both] for name in side.layers}
            for side, both in zip((before, now), known, strict=True)
        )
        # Parameters that are on one side only may have taken the place of others.
        self._have_parameters = [
            any(key[1] == "parameters" for keys in side.values() for key in keys)
            for side in (self._lost, self._gained)
        ]

    def runs(self) -> TwoRuns:
        """Return both as runs that show their tensors from causes to effects."""
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
            traces.append(Trace(side.observation, entries))
        return TwoRuns(traces[0], traces[1], self.alignment, TensorStore(0))

    @cached_property
    def tensors(self) -> tuple[tuple[TensorName, TensorName], ...]:
        """The names in the snapshot and in the report of every tensor that both have."""
        found = []
        for layer in self.new.layers:
            pair = self.alignment.by_candidate[layer]
            if pair.reference is None or pair.is_folded:
                continue
            for now in self.new.tensors[layer]:
                _, role, own = now
                origin: str | None = pair.reference
                if pair.output_of is not None and role != "inputs":
                    origin = pair.output_of if role in ("activations", "gradients") else None
                if origin is not None and (origin, role, own) in self.old.tensors[origin]:
                    found.append(((origin, role, own), now))
        return tuple(found)

    def changes(self) -> Iterator[LayerChange]:
        """Yield what became of each layer that is not what it was."""
        for pair in self.alignment.pairs:
            if pair.reference is not None and pair.candidate is not None:
                yield from self._changed(pair, pair.reference, pair.candidate)
            else:
                yield self._on_one_side(pair)

    def _on_one_side(self, pair: Pair) -> LayerChange:
        is_new, name = pair.reference is None, pair.name
        side = self.new if is_new else self.old
        record = side.layers[name]
        is_idle = pair.is_folded or not _computes(side, name)
        is_formal = not record.parameters or self._have_parameters[not is_new]
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
        if pair.note:  # it is folded, or others are folded into it
            yield LayerChange("changed", label, f": {pair.note}")
            return
        tensors = list(self._tensors_come_and_gone(reference, candidate))
        altered = self.causes.phrases[reference] or ", ".join(
            f"{name} {getattr(before, name)} is now {getattr(now, name)}"
            for name in ("status", "calls")
            if getattr(before, name) != getattr(now, name)
        )
        if not altered:
            yield from tensors
            return
        sides = ((self.old, reference), (self.new, candidate))
        is_idle = not any(_computes(*side) for side in sides) or all(
            name in side.holders and not side.layers[name].parameters for side, name in sides
        )
        is_formal = bool(candidate) and self.shows_output and not any(one.fails for one in tensors)
        fails = not (is_idle or is_formal)
        yield LayerChange("changed", label, f": {altered}", candidate, fails)

    def _tensors_come_and_gone(self, reference: str, candidate: str) -> Iterator[LayerChange]:
        ties = {one.parameter: one for one in self.causes.ties if one.pair.candidate == candidate}
        for tie in ties.values():
            yield LayerChange("changed", tie.label, f": {tie.phrase}", candidate, fails=True)
        # the inputs of inner layers only serve the story
        lost, gained = (
            [
                (role, own)
                for _, role, own in keys
                if own not in ties and not (role == "inputs" and layer)
            ]
            for keys, layer in (
                (self._lost[reference], reference),
                (self._gained[candidate], candidate),
            )
        )
        roles = {role for _, role, _ in self._lost[reference]}
        for role, own in lost:
            # every number may be as it was without a tensor, but not where nothing takes the
            # place of a parameter, or one that is still there has no gradient
            may_go = {
                "parameters": self._have_parameters[1],
                "parameter_gradients": own not in self.new.layers[candidate].parameters,
                "buffers": not own.startswith(("running_", "num_batches")),
            }.get(role, "parameter_gradients" not in roles)
            fails = not (reference and may_go and self.shows_output)
            label = self.old.label(reference, own)
            yield LayerChange(f"no {role} any more of", label, "", candidate, fails)
        for role, own in gained:
            is_formal = "parameter" not in role or self._have_parameters[0]
            label, fails = self.new.label(candidate, own), not (is_formal and self.shows_output)
            yield LayerChange(f"new {role} of", label, "", candidate, fails)


def _computes(side: Snapshot, layer: str) -> bool:
    """Whether a layer may change a number: an Identity and a mere container do not."""
    record = side.layers[layer]
    if record.status in UNCALLED or record.parameters:
        return record.status not in UNCALLED
    idle = record.status == Status.ALIAS_OF_INPUT or record.type_name == "Identity"
    return not (idle or layer in side.holders)


def grouped(changes: Iterable[LayerChange], *alone: str) -> list[list[LayerChange]]:
    """Return changes by their kind, as one cause often changes every layer alike.

    Of some kinds, as of ``"renamed"``, the rest of the phrase is that of one layer `alone`.
    """
    groups: dict[tuple[str, str], list[LayerChange]] = {}
    for one in changes:
        groups.setdefault((one.what, "" if one.what in alone else one.rest), []).append(one)
    return [*groups.values()]


def phrases(changes: Iterable[LayerChange]) -> list[str]:
    """Return a phrase for each kind of change."""
    found = []
    for first, *others in grouped(changes, "renamed"):
        more = f" and {len(others)} more" if others else ""
        parts = (first.rest, more) if first.what == "renamed" else (more, first.rest)
        found.append(shown(f"{first.what} {first.label}{''.join(parts)}"))
    return found
