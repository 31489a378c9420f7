"""`Difference`: what changed between two runs, the worst first and in a model the first layer."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Grade(StrEnum):
    """Whether a change is for the worse; most are neither. The gravest is first."""

    WORSE = "worse"
    BETTER = "better"
    CHANGED = "changed"
    SAME = "same"


@dataclass(frozen=True)
class Place:
    """Where something changed, from what to what, for people; ``""`` stands for none."""

    label: str  # of the layer, tensor or model in the head, or in the base where it is gone
    before: str = ""
    now: str = ""
    note: str = ""  # by how much


@dataclass(frozen=True)
class Change:
    """One thing that changed, in one or several places."""

    kind: str  # a word of ours: "verdict", "finding", "statistic", "cost"
    what: str  # what changed, in words of ours
    places: tuple[Place, ...]  # what came first is first
    grade: Grade = Grade.CHANGED


@dataclass(frozen=True)
class TestDifference:
    """What changed in a test and in its results."""

    __test__ = False

    id: str  # pytest's node id in the head, or in the base where it is gone
    changes: tuple[Change, ...] = ()  # those of the test, then of each result the gravest first
    causes: tuple[str, ...] = ()  # what began the drift of statistics, a sentence each
    remarks: tuple[str, ...] = ()  # what was not compared and why, a sentence each

    @property
    def grade(self) -> Grade:
        """The gravest of all its changes."""
        return min((one.grade for one in self.changes), key=[*Grade].index, default=Grade.SAME)


@dataclass(frozen=True)
class Difference:
    """What changed between two runs."""

    tests: tuple[TestDifference, ...]  # of which something is to be said, the worst first
    unchanged: int  # how many tests of both runs are as they were
    remarks: tuple[str, ...] = ()  # on the runs as a whole, a sentence each
