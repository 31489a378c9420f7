"""What a test's results object to: the culprit of each, and the places that lead there.

The destinations read nothing else; they load what draws when there is something to say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pytest_modelhealth.runs.run import FAILED, Run, Test

EXCEPTION = "exception"  # the check of a fault that is the test's own


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong with a model, or only looks like it."""

    verdict: str  # that of the result
    label: str  # the culprit for people; "" where there is none
    check: str  # its name, or the kind of result where no check found it
    message: str  # what is wrong
    cause: str  # why probably, or ""
    text: str  # what the failure says
    fails: bool  # whether it fails the test, rather than warns
    # `path:line` from the likeliest to repair to the surest to exist: the call of the culprit, its
    # class, the inspection, the test; of a batch, those that made it
    places: tuple[str, ...]

    @property
    def culprit(self) -> str:
        """Who and by which check: ``"encoder.1 (dead_units)"``."""
        return f"{self.label} ({self.check})" if self.label else self.check

    def place_in(self, root: Path, rootdir: Path) -> tuple[str, int] | None:
        """Return the first place in the checkout `root`: its POSIX path there, and the line.

        Places are relative to `rootdir`; libraries installed in the checkout are no files of it.
        """
        from pytest_modelhealth.rendering.places import is_of_a_library

        root = root.resolve()
        for place in self.places:
            path, _, line = place.rpartition(":")
            file = (rootdir / path).resolve()
            if file.is_file() and file.is_relative_to(root) and not is_of_a_library(place):
                return file.relative_to(root).as_posix(), max(1, int(line))
        return None


def faults(test: Test) -> Iterator[Fault]:
    """Yield what fails a test, the gravest of each result first, then what only warns."""
    is_failed = test["outcome"] in FAILED
    is_told = False
    for result in test["results"] if is_failed else ():
        is_in_doubt = result["verdict"] == "inconclusive" and "inconclusive: " in test["message"]
        found = result["inconclusive" if is_in_doubt else "violations"]
        is_told = is_told or bool(found)
        yield from (_fault(test, result, one, fails=True) for one in found)
    if is_failed and not is_told:
        places = (test.get("raised_at", ""), f"{test['file']}:{test['line']}")
        text = test["message"]
        yield Fault("failed", "", EXCEPTION, text, "", "", True, tuple(filter(None, places)))
    for result in test["results"] if is_failed or test["outcome"] == "passed" else ():
        found = result.get("warnings", ())
        yield from (_fault(test, result, one, fails=False) for one in found)


def failing(tests: Iterable[Test]) -> tuple[int, list[tuple[str, Fault]]]:
    """Return how many tests inspected a model, and what fails each failing one first, by id."""
    count, found = 0, []
    for test in tests:  # a run gives one at a time, so that one is in memory
        count += bool(test["results"])
        first = next((fault for fault in faults(test) if fault.fails), None)
        if first is not None:
            found.append((test["id"], first))
    return count, found


def inspected(count: int, run: Run) -> str:
    """Return of how many tests something was inspected: ``"30 of 39 tests inspected a model"``."""
    ran = run.head["ran"]
    return f"{count:,} of {ran:,} test{'s' * (ran != 1)} inspected a model"


_MOST_ROWS, _LONGEST_TEXT, _LONGEST_REMARK = 100, 20_000, 100


def summary(run: Run, most_bytes: int) -> str:
    """Return Markdown of at most `most_bytes`: a table of the failing tests, then their texts."""
    from pytest_modelhealth.rendering.document import Document, Row, fitting
    from pytest_modelhealth.rendering.notation import Column, plural, shorten

    count, found = failing(run.tests)
    failed = plural(len(found), "test")
    verdict = f"{failed} failed" if found else "no objection"
    status = f"exit status {run.head['exit_status']}"
    notes = [*run.head["notes"]]
    document = Document(
        f"Model health: {verdict}, {inspected(count, run)}, {status}",
        facts=notes,
        columns=[*map(Column, ("test", "verdict", "culprit", "check", "what"))] if found else (),
        rows=[Row([n, f.verdict, f.label, f.check, f.message]) for n, f in found],
        most=_MOST_ROWS,
        rest=lambda _: f"{failed} in all",
    )
    head = f"\n{document.markdown()}"
    room = most_bytes - len(head.encode()) - _LONGEST_REMARK
    if room < 0 or not (count or found or notes):
        return ""
    told = [(name, shorten(f.text, _LONGEST_TEXT).splitlines()) for name, f in found if f.text]
    texts = (Document(name, code=code) for name, code in told)
    shown = fitting((f"\n{text.markdown()}" for text in texts), room)
    without = plural(len(told) - len(shown), "failing test")
    remark = f"\n*The texts of {without} are left out: a summary holds no more.*\n"
    return "".join([head, *shown, remark * (len(shown) < len(told))])


def _fault(
    test: Test, result: Mapping[str, Any], finding: Mapping[str, Any], *, fails: bool
) -> Fault:
    is_of_the_batch = finding.get("layer") == "" and finding.get("role") == "inputs"
    own = () if is_of_the_batch else (finding.get("called_at"), finding.get("defined_at"))
    places = (*own, result["place"], f"{test['file']}:{test['line']}")
    return Fault(
        verdict=result["verdict"],
        **{key: finding[key] for key in ("label", "check", "message", "cause")},
        text=result["text"],
        fails=fails,
        places=tuple(place for place in places if place),
    )
