"""Drift: each tensor against the noise of its snapshot, what left it, and what began that."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from pytest_modelhealth.comparison.counterparts import Link
from pytest_modelhealth.comparison.first_divergence import Search
from pytest_modelhealth.comparison.layer_differences import Changed
from pytest_modelhealth.comparison.results import TensorResult
from pytest_modelhealth.comparison.runs import Key
from pytest_modelhealth.snapshot.changes import LayerChange, SnapshotPair, phrases, stage
from pytest_modelhealth.snapshot.snapshot import (
    Allowance,
    Snapshot,
    Tolerances,
    is_judged_whole,
    judges_zeros,
    shape_text,
)
from pytest_modelhealth.statistics import TensorStatistics
from pytest_modelhealth.tolerance import LOSS as LOSS_NAME
from pytest_modelhealth.tolerance import TensorName

LOSS = "loss"
MOST_CHANGES = 6
_UNRECORDED = "it is of a version that recorded no warnings"

EXACT = ("dtype", "shape", "count", "nan_count", "inf_count")
REAL = ("rms", "std", "mean", "min", "max")
"""In this order: of several that moved alike, the first is shown."""

_COLUMNS = {"nan_count": "nan", "inf_count": "inf", "zero_fraction": "zeros"}
"""What a statistic is called in the file, where that is another name."""


@dataclass(frozen=True)
class Drift:
    """The statistic of a tensor that left its tolerance furthest."""

    role: str  # which tensor of the layer; ``"loss"`` for the loss
    layer: str  # name of the layer in the report
    label: str  # the tensor's name for people
    statistic: str  # column of the snapshot file
    before: str  # its value in the snapshot
    now: str  # its value in the report
    distance: float  # how far it moved; infinite where the two have no distance
    allowance: Allowance  # how far it may
    # whether only the form of the tensor changed, so that no number can be compared
    formal: bool = False

    @property
    def excess(self) -> float:
        """Distance by tolerance; infinite where the two should be equal."""
        if math.isfinite(self.distance) and self.allowance.distance:
            return self.distance / self.allowance.distance
        return math.inf

    @property
    def moved(self) -> str:
        """How far it moved, as a multiple of its noise or tolerance."""
        if math.isinf(self.excess):
            return "has to be equal"
        noise = self.allowance.noise
        ratio = self.excess if noise is None else self.distance / noise
        shown = f"{float(f'{ratio:.2g}'):,.0f}" if 10 <= ratio < 1e7 else f"{ratio:.2g}"
        return f"{shown} times its {'fixed tolerance' if noise is None else 'noise'}"


@dataclass(frozen=True)
class DriftReport:
    """What is different between a snapshot and a report."""

    pair: SnapshotPair  # both
    drifts: tuple[Drift, ...]  # one a tensor, from cause to effect
    changes: tuple[LayerChange, ...]  # layers that came, went or became something else
    # the tensors that did not drift, and what each was in the snapshot
    kept: Mapping[TensorName, TensorName]
    story: str = ""  # what began the drifts, a sentence; ``""`` where nothing drifted
    # names of the layers of which the story says all, where it is a change of calls or of a tied
    # weight
    told: frozenset[str] = frozenset()
    remarks: tuple[str, ...] = ()  # what may explain the differences, a sentence each
    new_warnings: tuple[str, ...] = ()  # those that the snapshot does not have, which fail
    gone_warnings: tuple[str, ...] = ()

    @property
    def tensors(self) -> int:
        """How many tensors both have."""
        return len(self.pair.tensors)

    @property
    def failing_changes(self) -> tuple[LayerChange, ...]:
        """The changes of layers that fail by themselves."""
        return tuple(change for change in self.changes if change.fails)

    @property
    def drifted(self) -> bool:
        """Whether anything differs that may not."""
        return bool(self.drifted_without_warnings or self.new_warnings)

    @property
    def drifted_without_warnings(self) -> bool:
        """Whether a number or a layer differs that may not."""
        return bool(self.drifts or self.failing_changes or not self.pair.has_common_layers)

    @property
    def headline(self) -> str:
        """What is newly warned of, or what drifted first and how far, or which layers came."""
        return f"new warning: {self.new_warnings[0]}" if self.new_warnings else self.moved

    @property
    def moved(self) -> str:
        """What drifted first and how far, or which layers came and went."""
        if not self.drifted_without_warnings:
            return f"no drift in {self.tensors} tensors"
        if not self.pair.has_common_layers:
            return "not the model of the snapshot: no layer of it is in the report"
        if not self.drifts:
            first, *others = phrases(self.failing_changes)
            more = f", and {len(others)} more" if others else ""
            return f"not the layers of the snapshot: {first}{more}"
        count, compared = len(self.drifts), f"({self.tensors:,} tensors compared)"
        if self.told:
            follow = "1 drift follows" if count == 1 else f"{count:,} drifts follow"
            return f"drift in {self.story}; {follow} {compared}"
        drift = self.drifts[0]
        what = drift.label if drift.role == LOSS else f"{drift.label} ({drift.role})"
        place = "the only drift" if count == 1 else f"first of {count:,} drifts"
        moved = drift.moved if math.isinf(drift.excess) else f"moved {drift.moved}"
        change = f"{drift.statistic} {drift.before} is now {drift.now}"
        return f"drift in {what}: {change}, {moved}, {place} {compared}"

    @property
    def note(self) -> str:
        """What is worth saying where nothing drifted; ``""`` for nothing."""
        harmless = self.harmless
        is_told = harmless != [_UNRECORDED] or self.pair.new.warnings
        if self.drifted or not harmless or not is_told:
            return ""
        shown, more = "; ".join(harmless[:MOST_CHANGES]), len(harmless) - MOST_CHANGES
        what = "but layers changed: " if self.changes else "but "
        return f"all {self.tensors} tensors agree with the snapshot, {what}{shown}" + (
            f"; {more} more" if more > 0 else ""
        )

    @property
    def harmless(self) -> list[str]:
        """What is different and fails nothing, a phrase each; an update takes it over."""
        gone = [f"no longer warned of: {text}" for text in self.gone_warnings]
        old, new = self.pair.old.warnings, self.pair.new.warnings
        is_older = old is None and new is not None
        return [*phrases(self.changes), *gone, *[_UNRECORDED] * is_older]

    def __str__(self) -> str:
        return self.headline


class Outcome(StrEnum):
    """What came of it."""

    UNCHANGED = "unchanged"
    DRIFTED = "drifted"
    RECORDED = "recorded"
    MISSING = "missing"


@dataclass(frozen=True)
class SnapshotCheck:
    """One comparison of a report with its snapshot."""

    file: str  # the snapshot's
    outcome: Outcome  # what came of it
    text: str  # what the failure says; ``""`` where there is none
    now: Snapshot  # what the report has
    found: DriftReport | None = None  # what separates the two, where both are there
    change: str = ""  # why it was recorded; ``""`` where it was not


def detect_drift(before: Snapshot, now: Snapshot) -> DriftReport:
    """Return what separates two snapshots; the noise or scale of `before` sets the tolerances."""
    pair, tolerances = SnapshotPair(before, now), Tolerances(before, now.epsilon)
    of_tensors = {names: _drift(pair, tolerances, *names) for names in pair.tensors}
    loss = _loss_drift(tolerances, before.observation.loss, now.observation.loss)
    kept = {new: old for (old, new), drift in of_tensors.items() if drift is None}
    kept |= {} if loss else {LOSS_NAME: LOSS_NAME}
    drifts = [drift for drift in (*of_tensors.values(), loss) if drift is not None]
    drifts.sort(key=lambda drift: stage(drift.role, drift.layer, now.place))
    # An input that the layer makes the same of is another form of it.
    others = {drift.layer for drift in drifts if drift.role != "inputs" and not drift.formal}
    forms = [
        one for one in drifts
        if pair.shows_output
        and (one.formal or (one.role == "inputs" and one.layer not in {"", *others}))
    ]  # fmt: skip
    drifts = [drift for drift in drifts if drift not in forms]
    changes = [*pair.changes()]
    for one in forms:
        seen = f"{one.statistic} {one.before}, now {one.now}"
        rest = f": its {one.role} are another thing ({seen}), not compared"
        changes.append(LayerChange("changed", one.label, rest, one.layer))
    story, told = _story(pair, of_tensors, drifts) if drifts else ("", frozenset[str]())
    remarks = tuple(_remarks(pair, drifts, tolerances))
    warned = _warnings(pair)
    return DriftReport(pair, tuple(drifts), tuple(changes), kept, story, told, remarks, *warned)


def _warnings(pair: SnapshotPair) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the warnings that only the later has, and those that only the earlier has."""
    old, new, to = pair.old.warnings, pair.new.warnings or {}, pair.alignment.to_candidate
    if old is None:
        return (), ()
    before = {(check, to.get(name, name), kind): kind for check, name, kind in old}
    gained = {text: key for key, text in reversed([*new.items()]) if key not in before}
    lost = [(kind, (check, name)) for check, name, kind in before if (check, name, kind) not in new]
    told = ([*reversed(gained.items())], lost)
    a, b = (tuple(f"{pair.new.label(k[1])} ({k[0]}): {text}" for text, k in one) for one in told)
    return a, b


def _drift(
    pair: SnapshotPair, tolerances: Tolerances, old: TensorName, new: TensorName
) -> Drift | None:
    """Return the statistic of a tensor that left its tolerance furthest, if any did."""
    before, now = pair.old.tensors[old[0]][old], pair.new.tensors[new[0]][new]
    found = []
    for statistic in _judged(pair, old, new, before, now):
        a, b = getattr(before, statistic), getattr(now, statistic)
        if a == b or (a != a and b != b):
            continue
        distance, allowance = math.inf, Allowance(0.0)
        if statistic not in EXACT:
            distance, allowance = abs(b - a), tolerances.of(old, before, statistic)
        if not distance <= allowance.distance:  # a NaN on one side only is never within
            is_part = statistic == "zero_fraction"
            texts = (f"{100 * a:.2f}%", f"{100 * b:.2f}%") if is_part else _spelled(a, b)
            label, column = pair.new.label(new[0], new[2]), _COLUMNS.get(statistic, statistic)
            found.append(Drift(new[1], new[0], label, column, *texts, distance, allowance))
    if not found:
        return None
    # Most often all of them moved alike, and then the first says most.
    largest = max(drift.excess for drift in found)
    first = next(drift for drift in found if drift.excess >= largest / 2)
    # A tensor within the model in another shape has the same numbers. Where it is recorded in
    # another number, as of a layer that is called twice or returns a tensor more, none of its
    # statistics can be compared. Gradients of the model's own outputs come in any order, and the
    # last has the shape.
    moved, free, is_inner = {drift.statistic for drift in found}, {"shape"}, bool(old[0] and new[0])
    if is_inner and "count" in moved and new[1] in ("activations", "gradients"):
        free |= {"count", "zeros", *REAL}
    is_formal = moved <= free and not moved.isdisjoint(("shape", "count"))
    return replace(first, formal=is_formal and (is_inner or new[1] == "gradients"))


def _judged(
    pair: SnapshotPair,
    old: TensorName,
    new: TensorName,
    before: TensorStatistics,
    now: TensorStatistics,
) -> tuple[str, ...]:
    """Return the statistics to compare."""
    if not is_judged_whole(new):  # its form may change, as in another order of dimensions
        return REAL if before.count == now.count else ()
    judged = (*EXACT, *REAL, *(("zero_fraction",) if judges_zeros(new) else ()))
    is_turned = before.shape != now.shape and before.shape[::-1] == now.shape
    types = pair.old.layers[old[0]].type_name, pair.new.layers[new[0]].type_name
    if is_turned and "parameter" in new[1] and types[0] != types[1]:  # stored transposed there
        return tuple(one for one in judged if one != "shape")
    return judged


def _loss_drift(tolerances: Tolerances, a: float | None, b: float | None) -> Drift | None:
    distance, allowance = math.inf, Allowance(0.0)
    if a is not None and b is not None:
        distance, allowance = abs(b - a), tolerances.of_loss(a)
    if a == b or (a != a and b != b) or distance <= allowance.distance:
        return None
    texts = _spelled(*("none" if loss is None else loss for loss in (a, b)))
    return Drift(LOSS, "", LOSS, "value", *texts, distance, allowance)


def _spelled(a: Any, b: Any) -> tuple[str, str]:
    """Return two values with as many digits as show that they differ, and at least five."""
    for digits in (5, 7, 9, 17):
        one, other = (
            shape_text(value)
            if isinstance(value, tuple)
            else format(value + 0.0, f".{digits}g")
            if isinstance(value, float)
            else str(value)
            for value in (a, b)
        )
        if one != other:
            break
    return one, other


def _story(
    pair: SnapshotPair,
    of_tensors: Mapping[tuple[TensorName, TensorName], Drift | None],
    drifts: Sequence[Drift],
) -> tuple[str, frozenset[str]]:
    """Return what began the drifts, and the layers of which that says all.

    The latter is where it is a change of calls or of a tied weight.
    """
    began, none = drifts[0], frozenset[str]()
    if began.role == LOSS:
        return "every layer agrees and the loss does not: its function or the target changed", none
    if began.role == "inputs" and not began.layer:
        return f"{pair.new.label('')}: the batch is another one", none
    results, values = [], {name: dict[str, str]() for name in pair.old.layers}
    first = None
    for old, new in sorted(of_tensors, key=lambda one: stage(one[1][1], one[1][0], pair.new.place)):
        drift, result = of_tensors[old, new], TensorResult(Link(Key(*old), Key(*new)), 1.0)
        results.append(result)
        if drift is None:
            continue
        result.error, result.floor = (drift.excess, drift.excess), (1.0, 1.0)
        if drift.role == "parameters":
            phrase = f"{drift.statistic} of {new[2]} is {drift.now}, was {drift.before}"
            values[old[0]][old[2]] = phrase
        if first is None and (drift.role, drift.label) == (began.role, began.label):
            first = result
    for tie in pair.causes.ties:
        values[tie.pair.name].setdefault(tie.parameter, tie.phrase)
    assert first is not None
    changed = {name: Changed(of_layer, {}, True) for name, of_layer in values.items()}
    divergence = Search(pair.runs(), changed, results, of_snapshots=True).begun_by(first)
    if not divergence.causes:
        why = filter(None, (divergence.label, divergence.story, divergence.cause))
        return ": ".join(why), none
    to = pair.alignment.to_candidate
    told = frozenset(to[name] for cause in divergence.causes for name in cause.inside)
    return "; ".join(map(str, divergence.causes)), told


def _remarks(pair: SnapshotPair, drifts: Sequence[Drift], tolerances: Tolerances) -> Iterator[str]:
    before, now = pair.old, pair.new
    parameters = sum(len(record.parameters) for record in now.layers.values())
    if any(drift.role == "inputs" and not drift.layer for drift in drifts):
        yield "The batch itself changed; the rest may only follow from that."
    elif sum(drift.role == "parameters" for drift in drifts) > parameters / 2:
        yield "Most parameters changed: seed before the model is built (torch.manual_seed)."
    if not before.calibrated:
        yield (
            "The snapshot holds no measured noise, so its tolerances are fixed; recording it anew "
            "with the inspector fixture measures it."
        )
    if tolerances.widened > 1:
        yield (
            f"Matrix products are coarser than when it was recorded: tolerances are "
            f"{tolerances.widened:,.0f} times wider."
        )
    if before.recorded != now.recorded:
        yield f"The snapshot was recorded with {before.recorded}; this is {now.recorded}."
