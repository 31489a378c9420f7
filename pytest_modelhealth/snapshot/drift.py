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
        """How far it moved, for people."""
        return self.by_how_much or "has to be equal"

    @property
    def by_how_much(self) -> str:
        """The same as a multiple of its noise or tolerance; ``""`` where it may not move at all."""
        if math.isinf(self.excess):
            return ""
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
    """

    file: str
    outcome: Outcome
    text: str
    now: Snapshot
    before: Snapshot | None = None
    found: DriftReport | None = None


def explain(report: DriftReport) -> list[str]:
    """Return the differences as lines, the verdict first; none where nothing may fail."""
    if not report.drifted:
        return []
    changes = phrases(
        [change for change in report.changes if change.layer not in report.told]
        if report.drifts
        else report.failing_changes
    )
    changes = changes if report.drifts or not report.has_common_layers else changes[1:]
    lines = [_headline(report)]
    if report.story and not report.told:
        lines.append(report.story)
    lines += changes[:MOST_CHANGES]
    lines += _rest(changes, MOST_CHANGES, "changes of layers")
    shown, folded = _folded(report.drifts)
    if shown:
        lines += _table(shown)
    if folded:
        lines.append(_fold_line(shown, folded))
    return [*lines, *report.remarks]


def summary(report: DriftReport) -> str:
    """Return in one line what drifted, by how much and in how many layers."""
    layers = {drift.layer for drift in report.drifts if drift.role != LOSS}
    if not layers:
        return _headline(report)
    return f"{_headline(report)}, in {len(layers):,} {'layer' if len(layers) == 1 else 'layers'}"


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
    count = len(report.drifts)
    if report.told:
        follow = "1 drift follows" if count == 1 else f"{count:,} drifts follow"
        return f"drift in {report.story}; {follow} ({report.tensors:,} tensors compared)"
    drift = report.drifts[0]
    what = drift.label if drift.role == LOSS else f"{drift.label} ({drift.role})"
    place = "the only drift" if count == 1 else f"first of {count:,} drifts"
    moved = f"moved {drift.by_how_much}" if drift.by_how_much else drift.moved
    return (
        f"drift in {what}: {drift.statistic} {drift.before} is now {drift.now}, {moved}, "
        f"{place} ({report.tensors:,} tensors compared)"
    )


def _folded(drifts: Sequence[Drift]) -> tuple[list[Drift], list[Drift]]:
    """Return what is shown, and what is folded since it may only follow from that.

    Shown are parameters and the batch, which follow from nothing, the first layer that drifted in
    each pass, and the loss.
    """
    causes = [d for d in drifts if d.role == "parameters" or (d.role == "inputs" and not d.layer)]
    shown: list[Drift] = list(causes[:MOST_TENSORS])
    for roles in (("buffers", "inputs", "activations"), (LOSS,), ("gradients",)):
        found = [d for d in drifts if d.role in roles and d not in causes]
        shown += [d for d in found if d.layer == found[0].layer]
    if not any(d.role == "gradients" for d in shown):
        found = [d for d in drifts if d.role == "parameter_gradients"]
        shown += [d for d in found if d.layer == found[0].layer]
    ordered = [d for d in drifts if d in shown]
    return ordered[:MOST_TENSORS], [d for d in drifts if d not in ordered[:MOST_TENSORS]]


def _fold_line(shown: Sequence[Drift], folded: Sequence[Drift]) -> str:
    layers = {d.layer for d in folded} - {d.layer for d in shown}
    furthest = max(folded, key=lambda drift: drift.excess)
    tensors = f"{len(folded):,} more {'tensor' if len(folded) == 1 else 'tensors'}"
    many = f"{len(layers):,} {'layer' if len(layers) == 1 else 'layers'} after it ({tensors})"
    what = many if layers else f"{tensors} of these layers"
    return f"... and {what}, the furthest {furthest.label} ({furthest.role}): {furthest.moved}"


_TABLE = {
    "layer": "label",
    "role": "role",
    "statistic": "statistic",
    "snapshot": "before",
    "now": "now",
    "moved": "moved",
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
