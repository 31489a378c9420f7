"""The formats of a difference: for a terminal, as a comment in Markdown, as JSON.

In Markdown, for GitHub and GitLab, whatever comes from models, tests and messages stands in code
spans, in which nothing is markup, a mention, a reference or a link. The text stays far below the
65,536 characters that GitHub takes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict

from pytest_modelhealth.rendering.notation import plural, printable, shorten, table
from pytest_modelhealth.runs.difference.result import (
    Change,
    Difference,
    Grade,
    TestDifference,
)

_MOST_REMARKS = 5


def render(difference: Difference, name: str, *, colour: bool = False) -> str:
    """Return a difference in the format of this name, one of `FORMATS`.

    Args:
        difference: what to show.
        name: of the format.
        colour: whether the text goes to a terminal that shows colours.
    """
    return _terminal(difference, colour) if name == "terminal" else FORMATS[name](difference)


# What is said in all formats


def _counts(difference: Difference) -> dict[str, int]:
    counted = Counter(test.grade for test in difference.tests)
    return {grade.value: counted[grade] for grade in (Grade.WORSE, Grade.BETTER, Grade.CHANGED)}


def _headline(difference: Difference) -> str:
    """Return what became of the tests, in one line: ``"2 tests got worse; 148 unchanged"``."""
    counts = [
        f"{plural(count, 'test')} {grade if grade == Grade.CHANGED else f'got {grade}'}"
        for grade, count in _counts(difference).items()
        if count
    ]
    if not counts:
        return f"nothing changed in {plural(difference.unchanged, 'test')}"
    return f"{', '.join(counts)}; {difference.unchanged:,} unchanged"


def _changes(test: TestDifference, *, effects: bool = True) -> list[Change]:
    """Return what changed in a test, the worse first; of statistics perhaps the cause alone.

    Where activations moved, the loss and the gradients mostly follow.
    """
    left_out: list[Change] = []
    if not effects:
        for result in test.results:
            left_out += [change for change in result.changes if change.kind == "statistic"][1:]
    found = [change for change in test.every_change if change not in left_out]
    return sorted(found, key=lambda change: change.grade is not Grade.WORSE)


def _alike(difference: Difference) -> list[list[TestDifference]]:
    """Return the tests in groups in which the same changed, by other numbers at most.

    One change of a model mostly shows in every test of it; the first stands for its group.
    """
    groups: dict[object, list[TestDifference]] = {}
    for test in difference.tests:
        if test.grade is not Grade.SAME:
            causes = tuple(result.cause for result in test.results)
            changes = _changes(test, effects=False)
            seen = ((one.grade, one.what, one.places[0].label) for one in changes)
            groups.setdefault((causes, *seen), []).append(test)
    return list(groups.values())


def _rows(
    changes: Iterable[Change], most: int, shown: Callable[[str], str]
) -> Iterator[tuple[Change, list[str]]]:
    """Yield where, before, now and by how much, for `most` places of each change.

    The last of them stands for the others.
    """
    for change in changes:
        for index, place in enumerate(change.places[:most]):
            rest = len(change.places) - most if index == most - 1 else 0
            label, *others = map(shown, (place.label, place.before, place.now, place.note))
            yield change, [f"{label} and {rest:,} more" if rest > 0 else label, *others]


def _names(tests: Iterable[TestDifference], most: int, shown: Callable[[str], str]) -> str:
    names = [shown(test.id) for test in tests]
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _remarks(difference: Difference, shown: Callable[[str], str]) -> list[str]:
    """Return the remarks on the runs, and those on results with how many tests they stand at."""
    counted = Counter(
        remark
        for test in difference.tests
        for remark in dict.fromkeys(remark for result in test.results for remark in result.remarks)
    )
    return [
        *map(shown, difference.remarks[:_MOST_REMARKS]),
        *(
            f"{plural(count, 'test')}: {shown(remark)}"
            for remark, count in [*counted.items()][:_MOST_REMARKS]
        ),
    ]


# For a terminal

_COLOURS = {Grade.WORSE: "31", Grade.BETTER: "32", Grade.CHANGED: "33"}


def _terminal(difference: Difference, colour: bool = False) -> str:
    """Return the verdict, and below it what changed in each test, the worst first."""
    lines = [_headline(difference)]
    for test, *others in _alike(difference):
        grade = f"\033[{_COLOURS[test.grade]}m{test.grade}\033[0m" if colour else test.grade
        lines += ["", f"{grade}: {printable(test.id)}"]
        lines += [f"  likewise: {_names(others, 4, _short)}"] if others else []
        lines += [f"  {printable(result.cause)}" for result in test.results if result.cause]
        rows: list[list[str]] = []
        told = None
        for change, (label, before, now, note) in _rows(_changes(test), 2, _short):
            grade = "" if change.grade is Grade.CHANGED else change.grade
            head = ["", ""] if change is told else [grade, change.what]
            rows.append([*head, label, before, "->" if before and now else "", now, note])
            told = change
        lines += [f"  {line}" for line in table(rows, left=range(6))]
    remarks = _remarks(difference, printable)
    return "\n".join([*lines, *([""] if remarks else []), *remarks]) + "\n"


def _short(text: str) -> str:
    return shorten(printable(text), 60)


# Markdown

_MOST_CHARACTERS = 30_000
_MOST_ROWS, _MOST_ROWS_OF_A_TEST = 15, 6
"""So many rows stand in the table that is not folded away."""

_WIDEST = 160
"""Longer cells are cut."""

MARK = "<!-- pytest-modelhealth diff -->"
"""Shows nowhere; by it a script finds its comment again."""

_HEAD = "| | test | where | what | base | head | by |\n|---|---|---|---|---|---|---|"


def _markdown(difference: Difference) -> str:
    """Return the verdict, a table of the worst, and the rest folded away."""
    groups = _alike(difference)
    shown: list[str] = []
    for tests in groups:
        changes = _changes(tests[0], effects=False)
        most = min(_MOST_ROWS_OF_A_TEST, _MOST_ROWS - len(shown))
        shown += _markdown_rows(_names(tests, 1, _cell), changes[:most], 1)
    parts = [f"**modelhealth: {_headline(difference)}**"]
    parts += ["\n".join([_HEAD, *shown])] if shown else []
    causes = [result.cause for tests in groups for result in tests[0].results if result.cause]
    causes = [_code(cause, 2 * _WIDEST) for cause in dict.fromkeys(causes)][:_MOST_REMARKS]
    for remarks in (causes, _remarks(difference, _code)):
        parts += ["\n".join(f"- {remark}" for remark in remarks)] if remarks else []
    parts += _details(groups, shown, _MOST_CHARACTERS - sum(map(len, parts)))
    return "\n\n".join([*parts, MARK]) + "\n"


def _code(text: str, width: int = _WIDEST) -> str:
    """Return `text` as a code span on one line; a dash for none."""
    if not text:
        return "-"
    shown = shorten(printable(text[: width + 1]), width)
    fence = "`" * (max(map(len, re.findall("`+", shown)), default=0) + 1)
    pad = " " if shown[0] in "` " or shown[-1] in "` " else ""
    return f"{fence}{pad}{shown}{pad}{fence}"


def _cell(text: str) -> str:
    """Return the same for a table.

    A cell ends at a bar even in a code span. There "\\|" is a bar, and "\\\\|" an end again.
    """
    return _code(text).replace("\\|", "\\¦").replace("|", "\\|")


def _markdown_rows(name: str, changes: Iterable[Change], most: int) -> Iterator[str]:
    for change, (label, *others) in _rows(changes, most, _cell):
        grade = f"**{change.grade}**" if change.grade is Grade.WORSE else change.grade
        yield f"| {' | '.join([grade, name, label, change.what, *others])} |"
        name = ""


def _details(groups: list[list[TestDifference]], shown: list[str], budget: int) -> list[str]:
    """Return all changes folded away, as many as the budget holds, unless `shown` has them all."""
    every = (
        row
        for tests in groups
        for row in _markdown_rows(_names(tests, 21, _cell), _changes(tests[0]), 3)
    )
    head = f"<details><summary>all changes</summary>\n\n{_HEAD}\n"
    end = "\n\n</details>"
    more = "\n\nThe rest is in the output of `--format terminal` and `--format json`."
    left = budget - len(head + more + end)
    rows: list[str] = []
    for row in every:
        left -= len(row) + 1
        if left < 0:
            return [head + "\n".join(rows) + more + end]
        rows.append(row)
    return [head + "\n".join(rows) + end] if rows != shown else []


# JSON

FORMAT = "pytest-modelhealth difference"
FORMAT_VERSION = 1
"""Raised when a key changes its name or meaning."""


def _json(difference: Difference) -> str:
    """Return everything, with nothing shortened, as strict JSON in ASCII."""
    tests = [asdict(test) for test in difference.tests]
    for made, test in zip(tests, difference.tests, strict=True):
        for inner, result in zip(made["results"], test.results, strict=True):
            inner["grade"] = result.grade
        made["grade"] = test.grade
    data = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "headline": _headline(difference),
        **_counts(difference),
        "unchanged": difference.unchanged,
        "remarks": difference.remarks,
        "tests": tests,
    }
    return json.dumps(data, indent=1, allow_nan=False) + "\n"


FORMATS = {"json": _json, "markdown": _markdown, "terminal": _terminal}
