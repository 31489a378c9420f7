"""What every format says of a difference in words."""

from __future__ import annotations

from pytest_modelhealth.rendering.notation import plural
from pytest_modelhealth.runs.difference.result import Difference, Grade


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


def not_compared(difference: Difference) -> dict[str, int]:
    """Return the remarks on results, each with how many tests it stands at."""
    found: dict[str, int] = {}
    for test in difference.tests:
        for remark in {remark: None for result in test.results for remark in result.remarks}:
            found[remark] = found.get(remark, 0) + 1
    return found
