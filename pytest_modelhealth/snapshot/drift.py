"""Drift: where a report left its snapshot by more than rounding explains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from pytest_modelhealth.snapshot.changes import LayerChange, SnapshotPair, phrases
from pytest_modelhealth.snapshot.snapshot import Snapshot
from pytest_modelhealth.snapshot.tolerances import Allowance
from pytest_modelhealth.tolerance import TensorName

LOSS = "loss"
MOST_CHANGES = 6


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

    @property
    def tensors(self) -> int:
        """How many tensors both have."""
        return sum(1 for _ in self.pair.tensors())

    @property
    def failing_changes(self) -> tuple[LayerChange, ...]:
        """The changes of layers that fail by themselves."""
        return tuple(change for change in self.changes if change.fails)

    @property
    def drifted(self) -> bool:
        """Whether anything differs that may not."""
        if self.drifts or self.failing_changes:
            return True
        return not (self.pair.of_one_form or self.pair.has_common_layers)

    def __str__(self) -> str:
        return headline(self) if self.drifted else f"no drift in {self.tensors} tensors"


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


def note(report: DriftReport) -> str:
    """Return what is worth saying of a report that did not drift; ``""`` for nothing."""
    harmless = phrases(report.changes)
    if report.drifted or not harmless:
        return ""
    shown = "; ".join(harmless[:MOST_CHANGES])
    more = f"; {len(harmless) - MOST_CHANGES} more" if len(harmless) > MOST_CHANGES else ""
    return (
        f"all {report.tensors} tensors agree with the snapshot, but layers changed: {shown}{more}"
    )


def headline(report: DriftReport) -> str:
    """Return what drifted first and how far, or which layers came and went."""
    if not report.pair.has_common_layers:
        return "not the model of the snapshot: no layer of it is in the report"
    if not report.drifts:
        first, *others = phrases(report.failing_changes)
        more = f", and {len(others)} more" if others else ""
        return f"not the layers of the snapshot: {first}{more}"
    count, compared = len(report.drifts), f"({report.tensors:,} tensors compared)"
    if report.told:
        follow = "1 drift follows" if count == 1 else f"{count:,} drifts follow"
        return f"drift in {report.story}; {follow} {compared}"
    drift = report.drifts[0]
    what = drift.label if drift.role == LOSS else f"{drift.label} ({drift.role})"
    place = "the only drift" if count == 1 else f"first of {count:,} drifts"
    moved = drift.moved if math.isinf(drift.excess) else f"moved {drift.moved}"
    change = f"{drift.statistic} {drift.before} is now {drift.now}"
    return f"drift in {what}: {change}, {moved}, {place} {compared}"
