"""What became of the layers and tensors of one snapshot in another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from pytest_modelhealth.alignment.alignable import Alignable, Values, containers
from pytest_modelhealth.alignment.causes import Causes
from pytest_modelhealth.alignment.matching import align
from pytest_modelhealth.alignment.result import Change, Fold, Pair
from pytest_modelhealth.report import Status
from pytest_modelhealth.snapshot.snapshot import LayerLine, Snapshot, TensorLine, split

Key = tuple[str, str]
"""Role and own name of a tensor."""


class Side:
    """A snapshot with its tensors by layer.

    Attributes:
        snapshot: the snapshot.
        tensors: its lines by layer, then by role and own name.
        holders: names of the layers that others lie in.
        place: place of each layer in the order in which they returned.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.tensors: dict[str, dict[Key, TensorLine]] = {name: {} for name in snapshot.layers}
        for role, tensors in snapshot.tensors.items():
            for name, tensor in tensors.items():
                layer, own_name = split(role, name)
                self.tensors.setdefault(layer, {})[role, own_name] = tensor
        self.holders = containers(snapshot.layers)
        self.place = {name: place for place, name in enumerate(snapshot.layers)}

    def label(self, layer: str, own_name: str = "") -> str:
        """Return the name of a layer or tensor for people."""
        return ".".join(filter(None, (layer or self.snapshot.model, own_name)))

    def owns_parameters(self, layer: str) -> bool:
        """Whether a layer has parameters of its own."""
        return any(role == "parameters" for role, _ in self.tensors.get(layer, {}))

    def computes(self, layer: str) -> bool:
        """Whether a layer may change a number: an Identity and a mere container do not."""
        line = self.snapshot.layers[layer]
        if line.status == Status.NOT_CALLED:
            return False
        if self.owns_parameters(layer):
            return True
        idle = line.status == Status.ALIAS_OF_INPUT or line.type == "Identity"
        return not (idle or layer in self.holders)

    def is_mere_container(self, layer: str) -> bool:
        """Whether a layer only holds others."""
        return layer in self.holders and not self.owns_parameters(layer)

    def alignables(self) -> dict[str, Alignable]:
        """Return the layers as far as a snapshot knows them."""
        lines = self.snapshot.layers.items()
        return {name: self._alignable(name, line) for name, line in lines}

    def _alignable(self, name: str, line: LayerLine) -> Alignable:
        tensors = self.tensors[name]
        seen = tensors.get(("activations", ""))
        return Alignable(
            name=name,
            type_name=line.type,
            kind=line.activation or line.type,
            order=self.place[name] if line.calls else None,
            status=Status(line.status) if line.status in set(Status) else Status.OBSERVED,
            calls=line.calls,
            output=() if seen is None else seen.shape,
            output_size=None if seen is None else seen.count,
            parameters={
                own_name: _values(tensor)
                for (role, own_name), tensor in tensors.items()
                if role == "parameters"
            },
            trained=any(role == "parameter_gradients" for role, _ in tensors),
            tied=line.tied,
        )


def _values(line: TensorLine) -> Values:
    zeros = round(line.zeros * line.count) if line.zeros == line.zeros else 0
    return Values(line.shape, line.count, zeros, line.min, line.max, line.rms)


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


class Matching:
    """The layers and tensors of two snapshots side by side."""

    def __init__(self, before: Snapshot, now: Snapshot) -> None:
        self.old, self.new = Side(before), Side(now)
        self.alignment = align(self.old.alignables(), self.new.alignables())
        self.causes = Causes(self.alignment)
        self.origin = {pair.candidate: pair for pair in self.alignment.pairs if pair.aligned}

    @property
    def has_common_layers(self) -> bool:
        """Whether any layer but the models themselves is on both sides."""
        inner = [name for name in self.alignment.to_candidate if name]
        return bool(inner) or len(self.old.snapshot.layers) <= 1

    def tensors(self) -> Iterator[MatchedTensor]:
        """Yield every tensor that both have, in the order of the report's layers."""
        for layer, tensors in self.new.tensors.items():
            pair = self.origin.get(layer)
            if pair is None or pair.reference is None or pair.is_folded:
                continue
            folded = pair.output_of is not None
            for (role, own_name), tensor in tensors.items():
                origin = pair.reference
                if folded and role != "inputs":
                    if role not in ("activations", "gradients"):
                        continue
                    origin = pair.output_of or origin
                before = self.old.tensors.get(origin, {}).get((role, own_name))
                if before is not None:
                    yield MatchedTensor(layer, origin, role, own_name, before, tensor)

    def is_retyped(self, tensor: MatchedTensor) -> bool:
        """Whether the layer of a tensor is of another type than it was."""
        types = self.old.snapshot.layers, self.new.snapshot.layers
        return types[0][tensor.origin].type != types[1][tensor.layer].type

    def changes(self) -> Iterator[LayerChange]:
        """Yield what became of each layer that is not what it was."""
        parts = {name for split in self.alignment.splits for name in (split.whole, *split.parts)}
        for pair in self.alignment.pairs:
            if pair.reference is None:
                yield self._added(pair, parts)
            elif pair.candidate is None:
                yield self._removed(pair, parts)
            else:
                yield from self._changed(pair, pair.reference, pair.candidate)

    def _added(self, pair: Pair, parts: set[str]) -> LayerChange:
        name = pair.candidate or ""
        harmless = name in parts or not self.new.computes(name)
        formal = not self.new.owns_parameters(name) or self.has_lost_parameters
        note = f", {pair.note}" if pair.note else ""
        rest = f" ({self.new.snapshot.layers[name].type}{note})"
        return LayerChange("added", self.new.label(name), rest, harmless, name, formal)

    def _removed(self, pair: Pair, parts: set[str]) -> LayerChange:
        name = pair.reference or ""
        harmless = pair.is_folded or name in parts or not self.old.computes(name)
        formal = not self.old.owns_parameters(name) or self.has_gained_parameters
        note = f", {pair.note}" if pair.note else ""
        rest = f" ({self.old.snapshot.layers[name].type}{note})"
        return LayerChange("removed", self.old.label(name), rest, harmless, name, formal)

    def _changed(self, pair: Pair, reference: str, candidate: str) -> Iterator[LayerChange]:
        before, now = self.old.snapshot.layers[reference], self.new.snapshot.layers[candidate]
        label = self.old.label(reference)
        if reference != candidate:
            yield LayerChange("renamed", label, f" to {self.new.label(candidate)}", harmless=True)
        if pair.change is Change.MOVED:
            rest = " to another place among the layers"
            yield LayerChange("moved", label, rest, harmless=True, layer=candidate)
        if before.type != now.type:
            rest = f": type {before.type} is now {now.type}"
            yield LayerChange("changed", self.new.label(candidate), rest, harmless=True)
        altered = [
            f"{field} {getattr(before, field)} is now {getattr(now, field)}"
            for field in ("status", "calls")
            if getattr(before, field) != getattr(now, field)
        ]
        calls = self.causes.phrases.get(reference)
        altered = [calls] if calls else altered
        if isinstance(pair.reason, Fold):
            yield from self._noted(pair, candidate)
            return
        lost = list(self._tensors_come_and_gone(reference, candidate))
        if altered:
            sides = ((self.old, reference), (self.new, candidate))
            mere = all(side.is_mere_container(name) for side, name in sides) or not any(
                side.computes(name) for side, name in sides
            )
            label = self.new.label(candidate)
            formal = bool(candidate) and all(change.formal for change in lost)
            yield LayerChange("changed", label, f": {', '.join(altered)}", mere, candidate, formal)
        else:
            yield from self._noted(pair, candidate)
            yield from lost

    def _noted(self, pair: Pair, candidate: str) -> Iterator[LayerChange]:
        if pair.note:
            yield LayerChange("changed", self.new.label(candidate), f": {pair.note}", harmless=True)

    def _tensors_come_and_gone(self, reference: str, candidate: str) -> Iterator[LayerChange]:
        before, now = self.old.tensors[reference], self.new.tensors[candidate]
        ties = {one.parameter: one for one in self.causes.ties if one.pair.candidate == candidate}
        for tie in ties.values():
            yield LayerChange("changed", tie.label, f": {tie.phrase}", False, candidate)
        before, now = (
            {key: line for key, line in tensors.items() if key[1] not in ties}
            for tensors in (before, now)
        )
        for role, own_name in before:
            if (role, own_name) not in now and _is_counted(role, reference):
                formal = bool(reference) and self._may_go(role, own_name, reference, candidate)
                label = self.old.label(reference, own_name)
                yield LayerChange(f"no {role} any more of", label, "", False, candidate, formal)
        for role, own_name in now:
            if (role, own_name) not in before and _is_counted(role, candidate):
                label = self.new.label(candidate, own_name)
                formal = "parameter" not in role or self.has_lost_parameters
                yield LayerChange(f"new {role} of", label, "", False, candidate, formal)

    def _may_go(self, role: str, own_name: str, reference: str, candidate: str) -> bool:
        """Whether a tensor may be gone and every number be as it was.

        Not so: a parameter that nothing takes the place of, the gradient of a parameter that is
        still there, and running statistics.
        """
        before, now = self.old.tensors[reference], self.new.tensors[candidate]
        if role == "parameters":
            return self.has_gained_parameters
        if role == "parameter_gradients":
            return ("parameters", own_name) not in now
        if role == "buffers":
            return not own_name.startswith(("running_", "num_batches"))
        trained = [name for role, name in before if role == "parameter_gradients"]
        return all(("parameter_gradients", name) in now for name in trained)

    @cached_property
    def has_lost_parameters(self) -> bool:
        """Whether parameters are gone: others may have taken their place."""
        return self._has_more(self.old, self.new, self.alignment.to_candidate)

    @cached_property
    def has_gained_parameters(self) -> bool:
        """Whether there are parameters that were not."""
        back = {theirs: ours for ours, theirs in self.alignment.to_candidate.items()}
        return self._has_more(self.new, self.old, back)

    @staticmethod
    def _has_more(one: Side, other: Side, counterparts: Mapping[str, str]) -> bool:
        for layer, tensors in one.tensors.items():
            counterpart = counterparts.get(layer)
            known = {} if counterpart is None else other.tensors[counterpart]
            if any(key[0] == "parameters" and key not in known for key in tensors):
                return True
        return False


def _is_norm_folded(pair: Pair) -> bool:
    return pair.note.startswith("is folded")


def _is_counted(role: str, layer: str) -> bool:
    """Whether a tensor has to be on both sides: inputs of inner layers only serve the story."""
    return role != "inputs" or not layer


def phrases(changes: Iterable[LayerChange]) -> list[str]:
    """Return a phrase for each kind of change, as one cause often changes every layer alike."""
    groups: dict[tuple[str, str], list[LayerChange]] = {}
    for change in changes:
        rest = "" if change.what == "renamed" else change.rest
        groups.setdefault((change.what, rest), []).append(change)
    return [_phrase(what, same) for (what, _), same in groups.items()]


def _phrase(what: str, changes: list[LayerChange]) -> str:
    first = changes[0]
    more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
    if what == "renamed":
        return f"{what} {first.label}{first.rest}{more}"
    return f"{what} {first.label}{more}{first.rest}"
