"""A drift from a snapshot, for people who have not seen the model for a year: the cause first."""

from __future__ import annotations

from pytest_modelhealth.rendering.document import LINES, Document, Row
from pytest_modelhealth.rendering.notation import Column, few, printable
from pytest_modelhealth.snapshot.changes import phrases
from pytest_modelhealth.snapshot.drift import DriftReport

MOST_TENSORS = 8
MOST_CHANGES = 6
_COLUMNS = {"layer": True, "role": True, "statistic": True, "snapshot": False, "now": False}


def explain(report: DriftReport) -> list[str]:
    """Return the differences as lines, the verdict first; none where nothing may fail."""
    if not report.drifted:
        return []
    changes = phrases(change for change in report.changes if change.layer not in report.told)
    if not report.drifts:
        changes = phrases(report.failing_changes)[report.pair.has_common_layers :]
    story = [report.story] if report.story and not report.told else []
    if report.new_warnings:
        story = [*report.new_warnings[1:], report.moved, *story]
    document = Document(
        report.headline,
        facts=[*story, *few(changes, MOST_CHANGES, "more change")],
        columns=[
            Column(title, is_text=is_text)
            for title, is_text in {**_COLUMNS, "moved": False}.items()
        ],
        rows=[Row([d.label, d.role, d.statistic, d.before, d.now, d.moved]) for d in report.drifts],
        most=MOST_TENSORS,
        rest=lambda count: f"... and {count:,} more tensors after these",
        remarks=report.remarks,
        narrowest=((0, 20), (5, 20)),
        names=0,
    )
    lines = document.text(width=None, lines=LINES - 1).split("\n")  # besides how to accept it
    return [*map(printable, lines)]
