"""Drift in words and as a table, for people who have not seen the model for a year."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_modelhealth.snapshot.changes import phrases
from pytest_modelhealth.snapshot.drift import LOSS, Drift, DriftReport

MOST_TENSORS = 12
MOST_CHANGES = 6


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
    moved = drift.moved if drift.moved == "has to be equal" else f"moved {drift.moved}"
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
