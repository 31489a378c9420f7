"""`SnapshotCheck`: what came of holding a report against its snapshot, for those who tell of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pytest_modelhealth.snapshot.drift import DriftReport
from pytest_modelhealth.snapshot.snapshot import Snapshot


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
