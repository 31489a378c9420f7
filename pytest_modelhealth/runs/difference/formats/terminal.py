"""The difference for a terminal: a table a test, the worst test first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from pytest_modelhealth.rendering.notation import plural, printable, shorten, table
from pytest_modelhealth.runs.difference.result import Change, Difference, Grade, TestDifference
from pytest_modelhealth.runs.difference.wording import alike, headline, not_compared

MOST_PLACES = 2
"""So many places of one change are shown."""

MOST_OTHERS = 4
"""So many tests in which the same changed are named."""

WIDEST = 60
"""Longer cells are cut."""

_COLOURS = {Grade.WORSE: "31", Grade.BETTER: "32", Grade.CHANGED: "33"}


def render(difference: Difference, *, colour: bool = False) -> str:
    """Return the verdict, and below it what changed in each test.

    Args:
        difference: what to show.
        colour: whether to colour the grades, by the escapes of ANSI.
    """
    lines = [headline(difference), *map(printable, difference.remarks)]
    for first, *others in alike(test for test in difference.tests if test.grade is not Grade.SAME):
        lines += ["", *_test(first, others, colour)]
    remarks = not_compared(difference)
    lines += [""] if remarks else []
    lines += [f"{plural(count, 'test')}: {printable(text)}" for text, count in remarks.items()]
    return "\n".join(lines) + "\n"


def _test(test: TestDifference, others: Sequence[TestDifference], colour: bool) -> Iterator[str]:
    yield f"{_coloured(test.grade, colour)}: {printable(test.id)}"
    if others:
        named = [shorten(printable(other.id), WIDEST) for other in others[:MOST_OTHERS]]
        more = f" and {len(others) - MOST_OTHERS:,} more" if len(others) > MOST_OTHERS else ""
        yield f"  likewise: {', '.join(named)}{more}"
    yield from _table(test.changes)
    for result in test.results:
        if result.cause:
            yield f"  {printable(result.cause)}"
        yield from _table(result.changes)


def _table(changes: Iterable[Change]) -> Iterator[str]:
    rows = [row for change in changes for row in _rows(change)]
    if rows:
        yield from (f"  {line}" for line in table(rows, left=range(6)))


def _rows(change: Change) -> Iterator[list[str]]:
    grade = "" if change.grade is Grade.CHANGED else change.grade.value
    for index, place in enumerate(change.places[:MOST_PLACES]):
        head = ["", ""] if index else [grade, change.what]
        arrow = "->" if place.before and place.now else ""
        cells = (place.label, place.before, arrow, place.now, place.note)
        yield [*head, *(shorten(printable(cell), WIDEST) for cell in cells)]
    if len(change.places) > MOST_PLACES:
        more = f"... and {len(change.places) - MOST_PLACES:,} more"
        yield ["", "", more, "", "", "", ""]


def _coloured(grade: Grade, colour: bool) -> str:
    return f"\033[{_COLOURS[grade]}m{grade}\033[0m" if colour else grade.value
