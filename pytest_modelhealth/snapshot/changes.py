"""What became of the layers and tensors of one snapshot in another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from pytest_modelhealth.alignment.causes import Causes
from pytest_modelhealth.alignment.matching import align
from pytest_modelhealth.alignment.result import Change, Pair
from pytest_modelhealth.capture.observing.tensors import TensorStore
from pytest_modelhealth.comparison.links import FLOWING
from pytest_modelhealth.comparison.trace import KeptTensor, Key, Trace, TwoRuns
from pytest_modelhealth.report import ROLES, LayerRecord, Observation, Status
from pytest_modelhealth.snapshot.snapshot import Snapshot, TensorKey, TensorLine

Tensors = Mapping[TensorKey, TensorLine]


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
    """Return a key that sorts the tensors of a run from causes to effects.

    Args:
        role: of the tensor.
        layer: of the tensor.
        place: place of each layer in the order in which they returned.
    """
    position = place.get(layer, -1)
    stages = range(1, len(_STAGES)) if role == "inputs" and layer else range(5)
    at = next(i for i in stages if role in _STAGES[i])
    return at, -position if at == len(_STAGES) - 1 else position, _STAGES[at].index(role)


@dataclass(frozen=True)
class LayerChange:
    """What became of a layer, or of a tensor of it.

    Args:
        what: ``"renamed"``, ``"added"``, ``"no gradients any more of"``.
        label: the layer or tensor for people.
        rest: the rest of the phrase.
        harmless: whether no number changed by it.
        layer: name of the layer.
        formal: whether only what is recorded of the layer changed, so that it is harmless where
            every number agrees that can be compared.
    """

    what: str
    label: str
    rest: str = ""
    harmless: bool = False
    layer: str = ""
    formal: bool = False


@dataclass(frozen=True)
class MatchedTensor:
    """A tensor that both have.

    Args:
        layer: its layer in the report.
        origin: its layer in the snapshot.
        role: which tensor of the layer.
        own_name: its own name, ``""`` where the role has one tensor.
        before: the snapshot's line.
        now: the report's line.
    """

    layer: str
    origin: str
    role: str
    own_name: str
    before: TensorLine
    now: TensorLine


class SnapshotPair:
    """The layers and tensors of two snapshots side by side."""

    def __init__(self, before: Snapshot, now: Snapshot) -> None:
        self.old, self.new = before, now
        a, b = _trace(before), _trace(now)
        self.alignment = align(a.layers, b.layers)
        self.runs = TwoRuns(a, b, self.alignment, ({}, {}), TensorStore(0))
        self.causes = Causes(self.alignment)

    @property
    def has_common_layers(self) -> bool:
        """Whether any layer but the models themselves is on both sides."""
        return any(self.alignment.to_candidate) or len(self.old.layers) <= 1

    def origin(self, layer: str) -> str | None:
        """Return the name in the snapshot of a layer of the report; ``None`` if it is not there."""
        return self.alignment.by_candidate[layer].reference

    def tensors(self) -> Iterator[MatchedTensor]:
        """Yield every tensor that both have, in the order of the report's layers."""
        for layer, line in self.new.layers.items():
            pair = self.alignment.by_candidate[layer]
            if pair.reference is None or pair.is_folded:
                continue
            for (role, own_name), tensor in line.tensors.items():
                origin = pair.reference
                if pair.output_of is not None and role != "inputs":
                    if role not in ("activations", "gradients"):
                        continue
                    origin = pair.output_of
                before = self.old.layers[origin].tensors.get((role, own_name))
                if before is not None:
                    yield MatchedTensor(layer, origin, role, own_name, before, tensor)

    def changes(self) -> Iterator[LayerChange]:
        """Yield what became of each layer that is not what it was."""
        for pair in self.alignment.pairs:
            if pair.reference is not None and pair.candidate is not None:
                yield from self._changed(pair, pair.reference, pair.candidate)
            elif pair.reference is None:
                yield self._on_one_side("added", pair, self.new, self.has_lost_parameters)
            else:
                yield self._on_one_side("removed", pair, self.old, self.has_gained_parameters)

    def _on_one_side(
        self, what: str, pair: Pair, side: Snapshot, has_successors: bool
    ) -> LayerChange:
        name, line = pair.name, side.layers[pair.name]
        is_split = any(name in (one.whole, *one.parts) for one in self.alignment.splits)
        harmless = pair.is_folded or is_split or not side.computes(name)
        formal = not line.owns_parameters or has_successors
        rest = f" ({', '.join(filter(None, (line.type, pair.note)))})"
        return LayerChange(what, side.label(name), rest, harmless, name, formal)

    def _changed(self, pair: Pair, reference: str, candidate: str) -> Iterator[LayerChange]:
        before, now = self.old.layers[reference], self.new.layers[candidate]
        old_label, label = self.old.label(reference), self.new.label(candidate)
        if reference != candidate:
            yield LayerChange("renamed", old_label, f" to {label}", harmless=True)
        if pair.change is Change.MOVED:
            rest = " to another place among the layers"
            yield LayerChange("moved", old_label, rest, harmless=True, layer=candidate)
        if before.type != now.type:
            rest = f": type {before.type} is now {now.type}"
            yield LayerChange("changed", label, rest, harmless=True)
        altered = self.causes.phrases[reference] or ", ".join(
            f"{name} {getattr(before, name)} is now {getattr(now, name)}"
            for name in ("status", "calls")
            if getattr(before, name) != getattr(now, name)
        )
        lost = list(self._tensors_come_and_gone(reference, candidate))
        is_fold = pair.is_folded or bool(pair.folded_in)
        if altered and not is_fold:
            sides = ((self.old, reference), (self.new, candidate))
            mere = not any(side.computes(name) for side, name in sides) or all(
                name in side.holders and not side.layers[name].owns_parameters
                for side, name in sides
            )
            formal = bool(candidate) and all(change.formal for change in lost)
            yield LayerChange("changed", label, f": {altered}", mere, candidate, formal)
            return
        if pair.note:
            yield LayerChange("changed", label, f": {pair.note}", harmless=True)
        if not is_fold:
            yield from lost

    def _tensors_come_and_gone(self, reference: str, candidate: str) -> Iterator[LayerChange]:
        ties = {one.parameter: one for one in self.causes.ties if one.pair.candidate == candidate}
        for tie in ties.values():
            yield LayerChange("changed", tie.label, f": {tie.phrase}", False, candidate)
        before, now = self.old.layers[reference].tensors, self.new.layers[candidate].tensors
        for one, other, side, layer in (
            (before, now, self.old, reference),
            (now, before, self.new, candidate),
        ):
            for role, own_name in one:
                is_free = role == "inputs" and layer  # those of inner layers only serve the story
                if (role, own_name) in other or own_name in ties or is_free:
                    continue
                if side is self.new:
                    what = f"new {role} of"
                    formal = "parameter" not in role or self.has_lost_parameters
                else:
                    what = f"no {role} any more of"
                    formal = bool(reference) and self._may_go(role, own_name, before, now)
                label = side.label(layer, own_name)
                yield LayerChange(what, label, "", False, candidate, formal)

    def _may_go(self, role: str, own_name: str, before: Tensors, now: Tensors) -> bool:
        """Whether a tensor may be gone and every number be as it was.

        Not so: a parameter that nothing takes the place of, the gradient of a parameter that is
        still there, and running statistics.
        """
        if role == "parameters":
            return self.has_gained_parameters
        if role == "parameter_gradients":
            return ("parameters", own_name) not in now
        if role == "buffers":
            return not own_name.startswith(("running_", "num_batches"))
        trained = [key for key in before if key[0] == "parameter_gradients"]
        return all(key in now for key in trained)

    @cached_property
    def has_lost_parameters(self) -> bool:
        """Whether parameters are gone: others may have taken their place."""
        return _has_more(self.old, self.new, self.alignment.to_candidate)

    @cached_property
    def has_gained_parameters(self) -> bool:
        """Whether there are parameters that were not."""
        counterparts = {y: x for x, y in self.alignment.to_candidate.items()}
        return _has_more(self.new, self.old, counterparts)


def _trace(snapshot: Snapshot) -> Trace:
    """Return a snapshot as a run that shows its tensors from causes to effects."""
    layers, keys = {}, list[Key]()
    for place, (name, line) in enumerate(snapshot.layers.items()):
        tensors: dict[str, dict[str, Any]] = {role: {} for role in ROLES}
        for (role, own_name), tensor in line.tensors.items():
            tensors[role][own_name] = tensor  # it has the statistics that are read of it
            times = max(line.calls, 1) if role in ("inputs", "activations") else 1
            keys += [Key(name, role, own_name, number) for number in range(times)]
        seen: dict[str, Any] = {role: tensors.pop(role).get("") for role in FLOWING}
        seen |= tensors
        layers[name] = LayerRecord(
            name=name,
            type_name=line.type,
            status=Status(line.status) if line.status in set(Status) else Status.OBSERVED,
            activation=line.activation or None,
            entered=place if line.calls else None,
            calls=line.calls,
            tied=line.tied,
            **seen,
        )
    keys.sort(key=lambda key: stage(key.role, key.layer, snapshot.place))
    entries = {}
    for moment, key in enumerate(keys):
        tensor = snapshot.layers[key.layer].tensors[key.role, key.tensor]
        dtype = getattr(torch, tensor.dtype, torch.float32)
        entries[key] = KeptTensor(moment, moment, tensor.shape, dtype)
    return Trace(Observation(layers, snapshot.model), entries, "")


def _has_more(one: Snapshot, other: Snapshot, counterparts: Mapping[str, str]) -> bool:
    """Whether a side has a parameter of which the other has none of its name in its layer."""
    return any(
        role == "parameters"
        and (
            name not in counterparts
            or (role, own_name) not in other.layers[counterparts[name]].tensors
        )
        for name, line in one.layers.items()
        for role, own_name in line.tensors
    )


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
