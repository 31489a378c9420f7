"""What every format says of a difference in words."""

from __future__ import annotations

from collections.abc import Iterable

from pytest_modelhealth.rendering.notation import plural
from pytest_modelhealth.runs.difference.result import Change, Difference, Grade, TestDifference


def headline(difference: Difference) -> str:
    """Return what became of the tests, in one line: ``"2 tests got worse; 148 unchanged"``."""
    counts = [
        plural(count, "test") + f" {verb}"
        for grade, verb in (
            (Grade.WORSE, "got worse"),
            (Grade.BETTER, "got better"),
            (Grade.CHANGED, "changed"),
        )
        if (count := len(difference.graded(grade)))
    ]
    if not counts:
        return f"nothing changed in {plural(difference.unchanged, 'test')}"
    return f"{', '.join(counts)}; {difference.unchanged:,} unchanged"


def leading(test: TestDifference) -> list[Change]:
    """Return what changed in a test, the worse first; of statistics the cause without its effects.

    Where activations moved, the loss and the gradients mostly follow.
    """
    found = list(test.changes)
    for result in test.results:
        statistics = [change for change in result.changes if change.kind == "statistic"]
        found += [change for change in result.changes if change not in statistics[1:]]
    return sorted(found, key=lambda change: change.grade is not Grade.WORSE)


def alike(tests: Iterable[TestDifference]) -> list[list[TestDifference]]:
    """Return the tests in groups in which the same changed, by other numbers at most.

    One change of a model mostly shows in every test of it; the first stands for its group.
    """
    groups: dict[object, list[TestDifference]] = {}
    for test in tests:
        causes = tuple(result.cause for result in test.results)
        seen = ((one.grade, one.what, one.places[0].label) for one in leading(test))
        groups.setdefault((causes, *seen), []).append(test)
    return list(groups.values())


def not_compared(difference: Difference) -> dict[str, int]:
    """Return the remarks on results, each with how many tests it stands at."""
    found: dict[str, int] = {}
    for test in difference.tests:
        for remark in {remark: None for result in test.results for remark in result.remarks}:
            found[remark] = found.get(remark, 0) + 1
    return found
