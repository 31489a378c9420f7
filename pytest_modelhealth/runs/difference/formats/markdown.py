"""The difference as a comment in Markdown, for GitHub and GitLab.

Whatever comes from models, tests and messages stands in code spans, in which nothing is markup, a
mention, a reference or a link. The text stays far below the 65,536 characters that GitHub takes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from pytest_modelhealth.rendering.notation import plural, printable, shorten
from pytest_modelhealth.runs.difference.result import (
    Change,
    Difference,
    Grade,
    Place,
    TestDifference,
)
from pytest_modelhealth.runs.difference.wording import alike, headline, leading, not_compared

MOST_CHARACTERS = 30_000
MOST_ROWS = 15
"""So many rows stand in the table that is not folded away, of any one test at most a part:"""

MOST_ROWS_OF_A_TEST = 6
MOST_PLACES = 3
"""So many places of one change are shown among the details."""

MOST_OTHERS = 20
"""So many tests in which the same changed are named there."""

MOST_REMARKS = 5
WIDEST = 160
"""Longer cells are cut."""

MARK = "<!-- pytest-modelhealth diff -->"
"""Shows nowhere; by it a script finds its comment again."""

_TITLES = "| | test | where | what | base | head | by |\n|---|---|---|---|---|---|---|"


def render(difference: Difference, *, colour: bool = False) -> str:
    """Return the verdict, a table of the worst, and the rest folded away."""
    del colour
    changed = [test for test in difference.tests if test.grade is not Grade.SAME]
    shown = _first_rows(changed)
    parts = [f"**modelhealth: {headline(difference)}**"]
    if shown:
        parts.append("\n".join([_TITLES, *shown]))
    causes = list(islice(_causes(changed), MOST_REMARKS))
    parts += ["\n".join(causes)] if causes else []
    remarks = [f"- {code(remark)}" for remark in difference.remarks[:MOST_REMARKS]]
    remarks += [
        f"- {plural(count, 'test')}: {code(remark)}"
        for remark, count in [*not_compared(difference).items()][:MOST_REMARKS]
    ]
    parts += ["\n".join(remarks)] if remarks else []
    if _has_more(changed, len(shown)):
        parts.append(_details(changed, MOST_CHARACTERS - sum(map(len, parts))))
    return "\n\n".join([*parts, MARK]) + "\n"


def code(text: str, width: int = WIDEST) -> str:
    """Return `text` as a code span on one line; a dash for none."""
    if not text:
        return "-"
    shown = shorten(printable(text[: width + 1]), width)
    longest = max(map(len, re.findall("`+", shown)), default=0)
    fence = "`" * (longest + 1)
    pad = " " if shown[0] in "` " or shown[-1] in "` " else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def cell(text: str) -> str:
    """Return the same for a table.

    A cell ends at a bar even in a code span. There "\\|" is a bar, and "\\\\|" an end again.
    """
    return code(text).replace("\\|", "\\¦").replace("|", "\\|")


def _changes(test: TestDifference) -> list[Change]:
    """Return all changes of a test, those for the worse first."""
    every = [*test.changes, *(change for result in test.results for change in result.changes)]
    return sorted(every, key=lambda change: change.grade is not Grade.WORSE)


def _first_rows(tests: Iterable[TestDifference]) -> list[str]:
    rows: list[str] = []
    for first, *others in alike(tests):
        changes = leading(first)[: min(MOST_ROWS_OF_A_TEST, MOST_ROWS - len(rows))]
        for index, change in enumerate(changes):
            name = "" if index else _named(first, others)
            rows.append(_row(change.grade, name, change.what, change.places))
    return rows


def _named(test: TestDifference, others: Sequence[TestDifference]) -> str:
    return f"{cell(test.id)}{f' and {len(others):,} more' if others else ''}"


def _row(grade: Grade, test: str, what: str, places: Sequence[Place]) -> str:
    first = places[0]
    where = cell(first.label) if first.label else ""
    if len(places) > 1:
        where += f" and {len(places) - 1:,} more"
    mark = f"**{grade}**" if grade is Grade.WORSE else grade.value
    note = cell(first.note) if first.note else ""
    cells = (mark, test, where, what, cell(first.before), cell(first.now), note)
    return f"| {' | '.join(cells)} |"


def _causes(tests: Iterable[TestDifference]) -> Iterator[str]:
    seen = set()
    for test in tests:
        for result in test.results:
            if result.cause and result.cause not in seen:
                seen.add(result.cause)
                yield f"- {code(result.cause, 2 * WIDEST)}"


def _has_more(tests: Sequence[TestDifference], rows: int) -> bool:
    """Whether anything is left to tell that so many rows have not."""
    every = [change for test in tests for change in _changes(test)]
    return len(every) > rows or any(len(change.places) > 1 for change in every)


def _details(tests: Sequence[TestDifference], budget: int) -> str:
    head = f"<details><summary>all changes</summary>\n\n{_TITLES}\n"
    end = "\n\n</details>"
    more = "\n\nThe rest is in the output of `--format terminal` and `--format json`."
    left = budget - len(head) - len(end) - len(more)
    rows: list[str] = []
    for row in _every_row(tests):
        left -= len(row) + 1
        if left < 0:
            return head + "\n".join(rows) + more + end
        rows.append(row)
    return head + "\n".join(rows) + end


def _every_row(tests: Iterable[TestDifference]) -> Iterator[str]:
    for test, *others in alike(tests):
        name = ", ".join(cell(one.id) for one in (test, *others[:MOST_OTHERS]))
        if len(others) > MOST_OTHERS:
            name += f" and {len(others) - MOST_OTHERS:,} more"
        for change in _changes(test):
            places = change.places[:MOST_PLACES]
            for index, place in enumerate(places):
                is_last = index == len(places) - 1
                grouped = change.places[index:] if is_last else (place,)
                yield _row(change.grade, name, change.what, grouped)
                name = ""
