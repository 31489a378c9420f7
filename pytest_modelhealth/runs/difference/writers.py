"""The formats of a difference: for a terminal, as a comment in Markdown, as JSON.

In Markdown, for GitHub and GitLab, whatever comes from models, tests and messages stands in code
spans, in which nothing is markup, a mention, a reference or a link. The text stays far below the
65,536 characters that GitHub takes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

from pytest_modelhealth.rendering.notation import plural, printable, shorten, table
from pytest_modelhealth.runs.difference.result import (
    Change,
    Difference,
    Grade,
    Place,
    TestDifference,
)


def render(difference: Difference, name: str, *, colour: bool = False) -> str:
    """Return a difference in the format of this name, one of `FORMATS`.

    Args:
        difference: what to show.
        name: of the format.
        colour: whether the text goes to a terminal that shows colours.
    """
    return _terminal(difference, colour) if name == "terminal" else FORMATS[name](difference)


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


# For a terminal

_PLACES = 2
"""So many places of one change are shown."""

_OTHERS = 4
"""So many tests in which the same changed are named."""

_CELL = 60
"""Longer cells are cut."""

_COLOURS = {Grade.WORSE: "31", Grade.BETTER: "32", Grade.CHANGED: "33"}


def _terminal(difference: Difference, colour: bool = False) -> str:
    """Return the verdict, and below it what changed in each test, the worst first."""
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
        named = [shorten(printable(other.id), _CELL) for other in others[:_OTHERS]]
        more = f" and {len(others) - _OTHERS:,} more" if len(others) > _OTHERS else ""
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
    for index, place in enumerate(change.places[:_PLACES]):
        head = ["", ""] if index else [grade, change.what]
        arrow = "->" if place.before and place.now else ""
        cells = (place.label, place.before, arrow, place.now, place.note)
        yield [*head, *(shorten(printable(cell), _CELL) for cell in cells)]
    if len(change.places) > _PLACES:
        more = f"... and {len(change.places) - _PLACES:,} more"
        yield ["", "", more, "", "", "", ""]


def _coloured(grade: Grade, colour: bool) -> str:
    return f"\033[{_COLOURS[grade]}m{grade}\033[0m" if colour else grade.value


# Markdown

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

_HEAD = "| | test | where | what | base | head | by |\n|---|---|---|---|---|---|---|"


def _markdown(difference: Difference) -> str:
    """Return the verdict, a table of the worst, and the rest folded away."""
    changed = [test for test in difference.tests if test.grade is not Grade.SAME]
    shown = _first_rows(changed)
    parts = [f"**modelhealth: {headline(difference)}**"]
    if shown:
        parts.append("\n".join([_HEAD, *shown]))
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
            rows.append(_markdown_row(change.grade, name, change.what, change.places))
    return rows


def _named(test: TestDifference, others: Sequence[TestDifference]) -> str:
    return f"{cell(test.id)}{f' and {len(others):,} more' if others else ''}"


def _markdown_row(grade: Grade, test: str, what: str, places: Sequence[Place]) -> str:
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
    head = f"<details><summary>all changes</summary>\n\n{_HEAD}\n"
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
                yield _markdown_row(change.grade, name, change.what, grouped)
                name = ""


# JSON

FORMAT = "pytest-modelhealth difference"
FORMAT_VERSION = 1
"""Raised when a key changes its name or meaning."""


def _json(difference: Difference) -> str:
    """Return everything, with nothing shortened, as strict JSON in ASCII."""
    data = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "headline": headline(difference),
        **{
            grade.value: len(difference.graded(grade)) for grade in Grade if grade is not Grade.SAME
        },
        "unchanged": difference.unchanged,
        "remarks": difference.remarks,
        "tests": [_test_data(test) for test in difference.tests],
    }
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


def _test_data(test: TestDifference) -> dict[str, Any]:
    data = asdict(test)
    for made, result in zip(data["results"], test.results, strict=True):
        made["grade"] = result.grade
    return {**data, "grade": test.grade}


FORMATS = {"json": _json, "markdown": _markdown, "terminal": _terminal}
