"""`Difference`: what changed between two runs, the worst first and in a model the first layer."""

from __future__ import annotations

from collections.abc import Iterable
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
    """Where something changed, and from what to what.

    Args:
        label: of the layer, tensor or model in the head, or in the base where it is gone.
        before: value in the base, for people; ``""`` for none.
        now: value in the head, likewise.
        note: by how much.
    """

    label: str
    before: str = ""
    now: str = ""
    note: str = ""


@dataclass(frozen=True)
class Change:
    """One thing that changed, in one or several places.

    Args:
        kind: a word of ours: ``"verdict"``, ``"finding"``, ``"statistic"``, ``"cost"``.
        what: what changed, in words of ours.
        places: where: what came first is first.
        grade: whether that is worse.
    """

    kind: str
    what: str
    places: tuple[Place, ...]
    grade: Grade = Grade.CHANGED


def _gravest(changes: Iterable[Change]) -> Grade:
    return min((change.grade for change in changes), key=[*Grade].index, default=Grade.SAME)


@dataclass(frozen=True)
class ResultDifference:
    """What changed between two results of a test.

    Args:
        model: class name of the model in the head, or in the base where it is gone.
        changes: the gravest kind first.
        cause: what began the drift of statistics, a sentence; ``""`` where none drifted.
        remarks: what was not compared and why, a sentence each.
    """

    model: str
    changes: tuple[Change, ...] = ()
    cause: str = ""
    remarks: tuple[str, ...] = ()

    @property
    def grade(self) -> Grade:
        """The gravest of its changes."""
        return _gravest(self.changes)


@dataclass(frozen=True)
class TestDifference:
    """What changed in a test.

    Args:
        id: pytest's node id in the head, or in the base where it is gone.
        was: its id in the base, where that is another one; else ``""``.
        changes: those of the test itself.
        results: of its results, those in which something is to be said.
    """

    __test__ = False

    id: str
    was: str = ""
    changes: tuple[Change, ...] = ()
    results: tuple[ResultDifference, ...] = ()

    @property
    def every_change(self) -> list[Change]:
        """Its own changes, then those of its results."""
        return [*self.changes, *(change for result in self.results for change in result.changes)]

    @property
    def grade(self) -> Grade:
        """The gravest of all its changes."""
        return _gravest(self.every_change)


@dataclass(frozen=True)
class Difference:
    """What changed between two runs.

    Args:
        tests: those of which something is to be said, the worst first.
        unchanged: how many tests of both runs are as they were. Of those whose numbers could not be
            compared, `tests` has the remarks.
        remarks: on the runs as a whole, a sentence each.
    """

    tests: tuple[TestDifference, ...]
    unchanged: int
    remarks: tuple[str, ...] = ()
