"""Drift: where a report left its snapshot by more than rounding explains, in words and as a table.

It is for people who have not seen the model for a year: the cause comes first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from pytest_modelhealth.snapshot.changes import LayerChange, phrases
from pytest_modelhealth.snapshot.snapshot import Snapshot, TensorKey, TensorLine
from pytest_modelhealth.snapshot.tolerances import Allowance

LOSS = "loss"
MOST_TENSORS = 12
MOST_CHANGES = 6


@dataclass(frozen=True)
class Drift:
    """The statistic of a tensor that left its tolerance furthest.

    Args:
        role: which tensor of the layer; ``"loss"`` for the loss.
        layer: name of the layer in the report.
        label: the tensor's name for people.
        statistic: column of the snapshot file.
        before: its value in the snapshot, spelled as there, without its noise.
        now: its value in the report.
        distance: how far it moved; infinite where the two have no distance.
        allowance: how far it may.
        formal: whether only the form of the tensor changed, or what a layer takes and makes the
            same of, so that it is harmless where every number agrees that can be compared.
    """

    role: str
    layer: str
    label: str
    statistic: str
    before: str
    now: str
    distance: float
    allowance: Allowance
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
        if noise is not None:
            return f"{_count(self.distance / noise)} times its noise"
        return f"{_count(self.excess)} times its fixed tolerance"


def _count(ratio: float) -> str:
    if ratio >= 1e7:
        return f"{ratio:.1e}"
    return f"{float(f'{ratio:.2g}'):,.0f}" if ratio >= 10 else f"{ratio:.2g}"


@dataclass(frozen=True)
class DriftReport:
    """What is different between a snapshot and a report.

    Args:
        drifts: one a tensor, from cause to effect.
        changes: layers that came, went or became something else.
        tensors: how many tensors both have.
        story: what began the drifts, a sentence; ``""`` where nothing drifted.
        told: names of the layers of which the story says all, where it is a change of calls or of
            a tied weight.
        remarks: what may explain the differences, a sentence each.
        strict_names: whether changes that change no number are failures too.
        has_common_layers: whether any layer is on both sides.
        kept: the tensors that did not drift, by layer in the report, role and own name, each with
            its line in the snapshot.
    """

    drifts: tuple[Drift, ...]
    changes: tuple[LayerChange, ...]
    tensors: int
    story: str
    told: frozenset[str]
    remarks: tuple[str, ...]
    strict_names: bool
    has_common_layers: bool
    kept: Mapping[tuple[str, TensorKey], TensorLine]

    @property
    def failing_changes(self) -> tuple[LayerChange, ...]:
        """The changes of layers that fail by themselves."""
        strict = self.strict_names
        return tuple(change for change in self.changes if strict or not change.harmless)

    @property
    def drifted(self) -> bool:
        """Whether anything differs that may not."""
        return bool(self.drifts or self.failing_changes) or not self.has_common_layers

    def __str__(self) -> str:
        return "\n".join(explain(self)) or f"no drift in {self.tensors} tensors"


class Outcome(StrEnum):
    """What came of it."""

    UNCHANGED = "unchanged"
    DRIFTED = "drifted"
    RECORDED = "recorded"
    MISSING = "missing"


@dataclass(frozen=True)
class SnapshotCheck:
    """One comparison of a report with its snapshot.

    Args:
        file: the snapshot's.
        outcome: what came of it.
        text: what the failure says; ``""`` where there is none.
        now: what the report has.
        before: what was recorded; ``None`` where nothing was that could be compared.
        found: what separates the two, where both are there.
        change: why it was recorded; ``""`` where it was not.
    """

    file: str
    outcome: Outcome
    text: str
    now: Snapshot
    before: Snapshot | None = None
    found: DriftReport | None = None
    change: str = ""


def explain(report: DriftReport) -> list[str]:
    """Return the differences as lines, the verdict first; none where nothing may fail."""
    if not report.drifted:
        return []
    changes = phrases(
        [change for change in report.changes if change.layer not in report.told]
        if report.drifts
        else report.failing_changes
    )
    if not report.drifts and report.has_common_layers:
        del changes[0]  # which is the headline
    lines = [_headline(report)]
    if report.story and not report.told:
        lines.append(report.story)
    lines += changes[:MOST_CHANGES]
    if len(changes) > MOST_CHANGES:
        lines.append(f"... and {len(changes) - MOST_CHANGES} more changes of layers")
    shown = _shown(report.drifts)
    folded = [drift for drift in report.drifts if drift not in shown]
    lines += _table(shown) if shown else []
    if folded:
        layers = {d.layer for d in folded} - {d.layer for d in shown}
        furthest = max(folded, key=lambda drift: drift.excess)
        tensors = _plural(len(folded), "more tensor")
        what = f"{tensors} of these layers"
        if layers:
            what = f"{_plural(len(layers), 'layer')} after it ({tensors})"
        where = f"{furthest.label} ({furthest.role})"
        lines.append(f"... and {what}, the furthest {where}: {furthest.moved}")
    return [*lines, *report.remarks]


def _plural(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def summary(report: DriftReport) -> str:
    """Return in one line what drifted, by how much and in how many layers."""
    layers = {drift.layer for drift in report.drifts if drift.role != LOSS}
    where = f", in {_plural(len(layers), 'layer')}" if layers else ""
    return f"{_headline(report)}{where}"


def note(report: DriftReport) -> str:
    """Return what is worth saying of a report that did not drift; ``""`` for nothing."""
    harmless = phrases(change for change in report.changes if change.harmless)
    if report.drifted or not harmless:
        return ""
    shown = "; ".join(harmless[:MOST_CHANGES])
    more = f"; {len(harmless) - MOST_CHANGES} more" if len(harmless) > MOST_CHANGES else ""
    return (
        f"all {report.tensors} tensors agree with the snapshot, but layers changed: {shown}{more}"
    )


def _headline(report: DriftReport) -> str:
    if not report.has_common_layers:
        return "not the model of the snapshot: no layer of it is in the report"
    if not report.drifts:
        first, *others = phrases(report.failing_changes)
        more = f", and {len(others)} more" if others else ""
        what = "not the layers of the snapshot"
        if report.strict_names and all(change.harmless for change in report.changes):
            what = "not the names of the snapshot (strict_names; every number agrees)"
        return f"{what}: {first}{more}"
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


def _shown(drifts: Sequence[Drift]) -> list[Drift]:
    """Return the drifts to show; others may only follow from these.

    Shown are parameters and the batch, which follow from nothing, the first layer that drifted in
    each pass, and the loss.
    """
    causes = [d for d in drifts if d.role == "parameters" or (d.role == "inputs" and not d.layer)]
    shown = causes[:MOST_TENSORS]
    is_seen = any(d.role == "gradients" for d in drifts)
    last = "gradients" if is_seen else "parameter_gradients"
    for roles in (("buffers", "inputs", "activations"), (LOSS,), (last,)):
        found = [d for d in drifts if d.role in roles and d not in causes]
        shown += [d for d in found if d.layer == found[0].layer]
    return [drift for drift in drifts if drift in shown][:MOST_TENSORS]


_TABLE = {
    "layer": "label",
    "role": "role",
    "statistic": "statistic",
    "snapshot": "before",
    "now": "now",
    "moved": "moved",
}
"""The columns of the table, each with the field of `Drift` that fills it."""


def _table(drifts: Sequence[Drift]) -> list[str]:
    rows = [list(_TABLE)]
    rows += [[getattr(drift, field) for field in _TABLE.values()] for drift in drifts]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index < 3 else cell.rjust(width)  # words left, numbers right
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
