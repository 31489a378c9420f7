"""What changed between two inspections of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_modelhealth.runs.difference.findings import (
    finding_changes,
    verdict_change,
)
from pytest_modelhealth.runs.difference.result import Change, Place, ResultDifference
from pytest_modelhealth.runs.difference.snapshots import in_one_dtype, snapshot_of
from pytest_modelhealth.runs.difference.statistics import Moved, moved
from pytest_modelhealth.runs.difference.structure import Structure
from pytest_modelhealth.snapshot.changes import SnapshotPair

Data = Mapping[str, Any]


def compare_inspections(before: Data, now: Data) -> ResultDifference:
    """Return what changed; statistics of one batch, as training lets rounding grow."""
    pair = SnapshotPair(*in_one_dtype(snapshot_of(before), snapshot_of(now)))
    if not pair.has_common_layers:
        place = Place("", before["model"], now["model"], "no layer is in both")
        another = Change("model", "another model", (place,))
        changes = (*verdict_change(before, now), another)
        return ResultDifference(now["model"], changes, same_model=False)
    names = pair.alignment.to_candidate
    statistics = Moved()
    if before["of"] == now["of"] == "batch":
        statistics = moved(pair, (before["samples"] or 0, now["samples"] or 0))
    return ResultDifference(
        now["model"],
        changes=(
            *verdict_change(before, now),
            *finding_changes(before, now, names),
            *statistics.changes,
            *Structure(pair, before, now).changes(),
        ),
        cause=statistics.cause,
        remarks=statistics.remarks,
    )
