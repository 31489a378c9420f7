"""What one test made, as the plain data of the file of a run: a file for each kind of result."""

from __future__ import annotations

from typing import Any

from pytest_modelhealth.comparison.comparison import Comparison
from pytest_modelhealth.rendering.json import plain
from pytest_modelhealth.report import HealthReport
from pytest_modelhealth.runs.recording.comparison import of_comparison
from pytest_modelhealth.runs.recording.drift import of_drift
from pytest_modelhealth.runs.recording.inspection import of_inspection
from pytest_modelhealth.snapshot.drift import SnapshotCheck

Result = HealthReport | Comparison | SnapshotCheck


def record(result: Result, place: str) -> dict[str, Any]:
    """Return a result by the keys of the file of a run; numbers that are not finite are ``None``.

    Args:
        result: what a test made.
        place: ``path:line`` of the line that made it.
    """
    if isinstance(result, Comparison):
        made = of_comparison(result)
    elif isinstance(result, SnapshotCheck):
        made = of_drift(result)
    else:
        made = of_inspection(result._as_asked)
    return {"kind": made.pop("kind"), "place": place, **plain(made)}
