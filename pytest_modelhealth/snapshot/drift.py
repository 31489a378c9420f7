"""Drift: where a report left its snapshot by more than the tolerance, the earliest cause first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_modelhealth.snapshot.file_format import (
    LayerLine,
    Snapshot,
    TensorLine,
    layer_of,
    number,
    percentage,
)
from pytest_modelhealth.snapshot.tolerances import EXACT, FRACTIONS, REAL, Tolerances

MOST_TENSORS = 12
MOST_CHANGES = 6

_LOSS = "loss"
_STAGES = (
    ("inputs",),
    ("parameters",),
    ("buffers", "activations"),
    (_LOSS,),
    ("gradients", "parameter_gradients"),
)
"""A run from its causes to its effects, and in each stage the roles of a layer likewise. Only in
the last do later layers come first. Buffers may be either: a batch norm's follow earlier layers."""


@dataclass(frozen=True)
class Drift:
    """The statistic of a tensor that left its tolerance furthest.

    Args:
        role: which tensor of the layer; ``"loss"`` for the loss.
        layer: name of the layer.
        label: the tensor's name for people.
        statistic: column of the snapshot file.
        before: its value in the snapshot, spelled as there.
        now: its value in the report.
        difference: distance of the two; ``"-"`` where they have none.
        allowed: the tolerance.
        excess: distance by tolerance; infinite where the two should be equal.
    """

    role: str
    layer: str
    label: str
    statistic: str
    before: str
    now: str
    difference: str
    allowed: str
    excess: float


@dataclass(frozen=True)
class Comparison:
    """What is different between a snapshot and a report.

    Args:
        drifts: one a tensor, from cause to effect.
        changes: layers that came, went or became something else, a phrase each.
        tensors: how many tensors both have.
        remarks: what may explain the differences, a sentence each.
    """

    drifts: tuple[Drift, ...]
    changes: tuple[str, ...]
    tensors: int
    remarks: tuple[str, ...]


def compare(before: Snapshot, now: Snapshot) -> Comparison:
    """Compare the report `now` with the snapshot `before`, whose scale sets the tolerances."""
    old, new = _Side.of(before), _Side.of(now)
    renamed = _renamed(old, new)
    pairs = list(_pairs(old, new, renamed))
    tolerances = Tolerances(before)
    drifts = [drift for pair in pairs for drift in _tensor_drift(tolerances, *pair)]
    drifts += _loss_drift(tolerances, before.loss, now.loss)
    position = {name: index for index, name in enumerate(now.layers)}
    return Comparison(
        drifts=tuple(sorted(drifts, key=lambda drift: _stage(drift, position))),
        changes=tuple(_grouped(_changes(old, new, renamed))),
        tensors=len(pairs),
        remarks=tuple(_remarks(before, now, drifts)),
    )


Key = tuple[str, str]
"""Role and own name of a tensor."""


@dataclass(frozen=True)
class _Side:
    """A snapshot with its tensors by layer."""

    snapshot: Snapshot
    tensors: Mapping[str, Mapping[Key, TensorLine]]

    @classmethod
    def of(cls, snapshot: Snapshot) -> _Side:
        layers: dict[str, dict[Key, TensorLine]] = {name: {} for name in snapshot.layers}
        for role, tensors in snapshot.tensors.items():
            for name, tensor in tensors.items():
                layer = layer_of(role, name)
                own_name = name[len(layer) :].removeprefix(".")
                layers.setdefault(layer, {})[role, own_name] = tensor
        return cls(snapshot, layers)

    def label(self, layer: str, own_name: str = "") -> str:
        """Return the name of a layer or tensor for people."""
        return ".".join(filter(None, (layer or self.snapshot.model, own_name)))

    def kind(self, layer: str) -> tuple[object, ...]:
        """Return what a layer keeps when it is renamed."""
        shapes = {key: tensor.shape for key, tensor in self.tensors[layer].items()}
        return self.snapshot.layers[layer], shapes


Pair = tuple[str, str, str, TensorLine, TensorLine]
"""Layer, label and role of a tensor that both have, then the snapshot's line and the report's."""


def _pairs(old: _Side, new: _Side, renamed: Mapping[str, str]) -> Iterator[Pair]:
    former = {successor: name for name, successor in renamed.items()}
    for layer, tensors in new.tensors.items():
        references = old.tensors.get(former.get(layer, layer), {})
        for (role, own_name), tensor in tensors.items():
            reference = references.get((role, own_name))
            if reference is not None:
                yield layer, new.label(layer, own_name), role, reference, tensor


def _stage(drift: Drift, position: Mapping[str, int]) -> tuple[int, int, int]:
    stage = next(index for index, roles in enumerate(_STAGES) if drift.role in roles)
    place = position.get(drift.layer, -1)
    backward = stage == len(_STAGES) - 1
    return stage, -place if backward else place, _STAGES[stage].index(drift.role)


# One tensor.


def _tensor_drift(
    tolerances: Tolerances,
    layer: str,
    label: str,
    role: str,
    before: TensorLine,
    now: TensorLine,
) -> list[Drift]:
    found: list[Drift] = []
    for statistic in (*EXACT, *REAL, *FRACTIONS):
        a, b = getattr(before, statistic), getattr(now, statistic)
        if a == b or (a != a and b != b):
            continue
        if statistic in EXACT or a is None or b is None:
            distance, allowed = math.inf, 0.0
        elif statistic in REAL:
            distance, allowed = abs(b - a), tolerances.real(role, layer, before, a)
        else:
            distance, allowed = abs(b - a), tolerances.fraction(role, statistic)
        if not distance <= allowed:  # a NaN on one side only is never within
            spell = percentage if statistic in FRACTIONS else _spell
            found.append(
                _drift(role, layer, label, statistic, (spell(a), spell(b)), (distance, allowed))
            )
    largest = max((drift.excess for drift in found), default=0.0)
    # Most often all of them moved alike, and then the first says most.
    return [drift for drift in found if drift.excess >= largest / 2][:1]


def _loss_drift(tolerances: Tolerances, before: float | None, now: float | None) -> list[Drift]:
    if before == now or (before != before and now != now):
        return []
    if before is None or now is None:
        distance, allowed = math.inf, 0.0
    else:
        distance, allowed = abs(now - before), tolerances.loss(before)
    if distance <= allowed:
        return []
    return [_drift(_LOSS, "", _LOSS, "value", (_spell(before), _spell(now)), (distance, allowed))]


def _drift(
    role: str,
    layer: str,
    label: str,
    statistic: str,
    values: tuple[str, str],
    measures: tuple[float, float],
) -> Drift:
    distance, allowed = measures
    has_distance = math.isfinite(distance)
    return Drift(
        role=role,
        layer=layer,
        label=label,
        statistic=statistic,
        before=values[0],
        now=values[1],
        difference=f"{distance:.2g}" if has_distance else "-",
        allowed=f"{allowed:.2g}" if allowed else "exact",
        excess=distance / allowed if has_distance and allowed else math.inf,
    )


def _spell(value: object) -> str:
    if value is None:
        return "none"
    return number(value) if isinstance(value, float) else str(value)


# The layers themselves.


def _renamed(old: _Side, new: _Side) -> dict[str, str]:
    """Return the new name of each layer that went while one of the same kind and shapes came."""
    came = [name for name in new.snapshot.layers if name not in old.snapshot.layers]
    renamed = {}
    for name in old.snapshot.layers:
        if name not in new.snapshot.layers:
            kind = old.kind(name)
            successor = next((other for other in came if new.kind(other) == kind), None)
            if successor is not None:
                came.remove(successor)
                renamed[name] = successor
    return renamed


Change = tuple[str, str, str]
"""What happened, to which layer or tensor, and the rest of the phrase."""


def _changes(old: _Side, new: _Side, renamed: Mapping[str, str]) -> Iterator[Change]:
    before, now = old.snapshot.layers, new.snapshot.layers
    successors = set(renamed.values())
    for name, layer in now.items():
        if name not in before and name not in successors:
            yield "added", new.label(name), f" ({layer.type})"
    for name, layer in before.items():
        if name in renamed:
            yield "renamed", old.label(name), f" to {new.label(renamed[name])}"
        elif name not in now:
            yield "removed", old.label(name), f" ({layer.type})"
        elif layer != now[name]:
            yield "changed", new.label(name), f": {_alteration(layer, now[name])}"
        else:
            yield from _tensors_come_and_gone(old, new, name)


def _alteration(before: LayerLine, now: LayerLine) -> str:
    new = vars(now)
    return ", ".join(f"{k} {v} is now {new[k]}" for k, v in vars(before).items() if v != new[k])


def _tensors_come_and_gone(old: _Side, new: _Side, layer: str) -> Iterator[Change]:
    for role, own_name in old.tensors[layer]:
        if (role, own_name) not in new.tensors[layer]:
            yield f"no {role} any more of", old.label(layer, own_name), ""
    for role, own_name in new.tensors[layer]:
        if (role, own_name) not in old.tensors[layer]:
            yield f"new {role} of", new.label(layer, own_name), ""


def _grouped(changes: Iterable[Change]) -> Iterator[str]:
    """Yield a phrase for each kind of change, as one cause often changes every layer alike."""
    groups: dict[tuple[str, str], list[str]] = {}
    for what, name, rest in changes:
        groups.setdefault((what, rest), []).append(name)
    for (what, rest), names in groups.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield f"{what} {names[0]}{more}{rest}"


def _remarks(before: Snapshot, now: Snapshot, drifts: Sequence[Drift]) -> Iterator[str]:
    roles = [drift.role for drift in drifts]
    if "inputs" in roles:
        yield "The batch itself changed; the rest may only follow from that."
    elif roles.count("parameters") > len(now.tensors.get("parameters", ())) / 2:
        yield "Most parameters changed: seed before the model is built (torch.manual_seed)."
    if before.recorded != now.recorded:
        yield f"The snapshot was recorded with {before.recorded}; this is {now.recorded}."


# For people.


def explain(comparison: Comparison) -> list[str]:
    """Return the differences as lines, the verdict first; none where nothing is different."""
    if not comparison.drifts and not comparison.changes:
        return []
    lines = [_headline(comparison), *comparison.changes[:MOST_CHANGES]]
    lines += _rest(comparison.changes, MOST_CHANGES, "changes of layers")
    if comparison.drifts:
        lines += _table(comparison.drifts[:MOST_TENSORS])
        lines += _rest(comparison.drifts, MOST_TENSORS, "tensors that drifted")
    return [*lines, *comparison.remarks]


def _headline(comparison: Comparison) -> str:
    if not comparison.drifts:
        first, *others = comparison.changes
        more = f", and {len(others)} more" if others else ""
        return f"not the layers of the snapshot: {first}{more}"
    drift = comparison.drifts[0]
    what = drift.label if drift.role == _LOSS else f"{drift.label} ({drift.role})"
    count = len(comparison.drifts)
    place = "the only drift" if count == 1 else f"first of {count} drifts"
    return (
        f"drift in {what}: {drift.statistic} {drift.before} is now {drift.now}, "
        f"{place} ({comparison.tensors} tensors compared)"
    )


_TABLE = {
    "layer": "label",
    "role": "role",
    "statistic": "statistic",
    "snapshot": "before",
    "now": "now",
    "difference": "difference",
    "allowed": "allowed",
}
"""The columns of the table, each with the field of `Drift` that fills it."""

_FLUSH_LEFT = 3


def _table(drifts: Sequence[Drift]) -> list[str]:
    rows = [list(_TABLE)]
    rows += [[getattr(drift, field) for field in _TABLE.values()] for drift in drifts]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if index < _FLUSH_LEFT else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def _rest(items: Sequence[object], shown: int, what: str) -> list[str]:
    return [f"... and {len(items) - shown} more {what}"] if len(items) > shown else []
