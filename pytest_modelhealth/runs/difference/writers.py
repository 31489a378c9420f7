"""What a difference says: a document of the runs, and one of each test, as text or as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from pytest_modelhealth.alignment.result import listed
from pytest_modelhealth.rendering.document import Document, Row, fitting
from pytest_modelhealth.rendering.notation import Column, plural, printable, shorten
from pytest_modelhealth.runs.difference.comparing import (
    NEW_FINDING,
    NEW_WARNING,
    Difference,
    TestDifference,
)
from pytest_modelhealth.runs.difference.inspections import Change, Grade

MARK = "<!-- pytest-modelhealth diff -->"
"""Shows nowhere; by it a script finds its comment in Markdown again."""

# of Markdown: what is read at once, and all of it; GitHub takes 65,536
_UNFOLDED, _MOST_CHARACTERS = 4_000, 39_000
_WIDTH, _LONGEST_CELL = 120, 160
_MOST_REMARKS, _MOST_ROWS, _MOST_PLACES = 5, 30, 2
_COLUMNS = [Column(title, is_text=True) for title in ("", "what", "where", "base", "head", "by")]


def render(difference: Difference, name: str) -> str:
    """Return a difference as ``"terminal"`` shows it, or as a comment in ``"markdown"``."""
    documents = _documents(difference)
    if name == "terminal":
        return "\n\n".join(document.text(width=_WIDTH) for document in documents) + "\n"
    text, *sections = (document.markdown() for document in documents)
    folded = fitting(sections, _MOST_CHARACTERS - len(text))
    rest = plural(len(sections) - len(folded), "more test")
    folded += [f"{rest}: see the output of `--format terminal`.\n"] * (len(folded) < len(sections))
    while folded and len(text) < _UNFOLDED:
        text += f"\n{folded.pop(0)}"
    if folded:
        body = "\n".join(folded)
        text += f"\n<details><summary>the other changes</summary>\n\n{body}\n</details>\n"
    return f"{text}\n{MARK}\n"


def _documents(difference: Difference) -> Iterator[Document]:
    """Yield one of the runs, then one of each test, or of those in which the same changed."""
    yield Document(
        headline=f"modelhealth: {_headline(difference)}",
        facts=[*_new_findings(difference), *_remarks(difference)],
    )
    for test, *others in _alike(difference):
        names = listed([printable(other.id) for other in others], 4)
        causes = [*map(printable, test.causes)]
        changes = sorted(
            test.changes, key=lambda one: (one.what != NEW_WARNING, one.grade is not Grade.WORSE)
        )
        yield Document(
            headline=f"{test.grade}: {printable(test.id)}",
            facts=[*([f"likewise: {names}"] if others else []), *causes],
            columns=_COLUMNS,
            rows=[*_rows(changes)],
            most=_MOST_ROWS,
            rest=lambda count: plural(count, "more row"),
            narrowest=[(3, 60), (4, 60)],
            indent="  ",
        )


def _headline(difference: Difference) -> str:
    """Return what became of the tests, in one line: ``"2 tests got worse; 148 unchanged"``."""
    counted = Counter(test.grade for test in difference.tests)
    counts = [
        f"{plural(counted[grade], 'test')} {grade if grade is Grade.CHANGED else f'got {grade}'}"
        for grade in (Grade.WORSE, Grade.BETTER, Grade.CHANGED)
        if counted[grade]
    ]
    if not counts:
        return f"nothing changed in {plural(difference.unchanged, 'test')}"
    return f"{', '.join(counts)}; {difference.unchanged:,} unchanged"


def _new_findings(difference: Difference) -> Iterator[str]:
    """Yield what the head finds and the base did not, warnings first, each cause once.

    A layer that several tests share fails in each, by other numbers.
    """
    for what in (NEW_WARNING, NEW_FINDING):
        causes: dict[tuple[str, str], list[str]] = {}
        for change in (one for test in difference.tests for one in test.changes):
            for place in change.places if change.what == what else ():
                check = place.now.partition(":")[0]
                causes.setdefault((place.label, check), []).append(place.now)
        told = [one for one in causes.items() if what == NEW_WARNING or len(one[1]) > 1]
        for (label, _), texts in told[:_MOST_REMARKS]:
            count = f"{len(texts):,} tests: " * (len(texts) > 1)
            yield f"since this change: {count}{printable(label)} ({printable(texts[0])})"
        if len(told) > _MOST_REMARKS:
            yield f"since this change: {len(told) - _MOST_REMARKS:,} more, see each test"


def _remarks(difference: Difference) -> Iterator[str]:
    """Yield the remarks on the runs, and those on results with how many tests they stand at."""
    yield from map(printable, difference.remarks[:_MOST_REMARKS])
    counted = Counter(remark for test in difference.tests for remark in dict.fromkeys(test.remarks))
    for remark, count in [*counted.items()][:_MOST_REMARKS]:
        yield f"{plural(count, 'test')}: {printable(remark)}"


def _alike(difference: Difference) -> list[list[TestDifference]]:
    """Return the tests in groups in which the same changed, by other numbers at most.

    One change of a model mostly shows in every test of it; the first stands for its group.
    """
    groups: dict[object, list[TestDifference]] = {}
    for test in difference.tests:
        if test.grade is not Grade.SAME:
            # where activations moved, the loss and the gradients mostly follow
            effects = [one for one in test.changes if one.kind == "statistic"][1:]
            told = (one for one in test.changes if one not in effects)
            key = (*test.causes, *((one.grade, one.what, one.places[0].label) for one in told))
            groups.setdefault(key, []).append(test)
    return [*groups.values()]


def _rows(changes: Iterable[Change]) -> Iterator[Row]:
    """Yield the first places of each change; the last of them stands for the others."""
    for change in changes:
        grade = "" if change.grade is Grade.CHANGED else str(change.grade)
        head = [grade, change.what]
        more = len(change.places) - _MOST_PLACES
        for index, place in enumerate(change.places[:_MOST_PLACES], 1):
            cells = (place.label, place.before, place.now, place.note)
            label, *others = (shorten(printable(cell), _LONGEST_CELL) for cell in cells)
            label += f" and {more:,} more" if more > 0 and index == _MOST_PLACES else ""
            yield Row([*head, label, *others])
            head = ["", ""]
