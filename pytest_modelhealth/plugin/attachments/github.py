"""Annotations and the step's summary under GitHub Actions: a line at the culprit, and a table.

Commands and their escapes are those of
https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pytest_modelhealth.runs.faults import Fault
    from pytest_modelhealth.runs.run import Run, Test


MOST_ANNOTATIONS = 10
"""GitHub shows no more errors of a step."""

MOST_BYTES = 1024 * 1024
"""GitHub drops the summary of a step that is longer."""

_LONGEST_TEXT = 20_000
_MOST_ROWS = 100
_LONGEST_REMARK = 100


def pytest_modelhealth_wants_run() -> bool:
    """Ask for the run where GitHub reads what it says."""
    return os.environ.get("GITHUB_ACTIONS") == "true"


def pytest_modelhealth_run_ended(
    config: pytest.Config, run: Run, terminalreporter: pytest.TerminalReporter
) -> None:
    """Annotate the culprits, and append to the summary; a file that cannot be written is named."""
    if not pytest_modelhealth_wants_run():
        return
    workspace = Path(os.environ.get("GITHUB_WORKSPACE") or config.rootpath)
    for line in commands(run.tests, config.rootpath, workspace):
        terminalreporter.write_line(line)
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return
    try:
        with Path(path).open("ab") as file:
            file.write(summary(run.tests, MOST_BYTES - file.tell()).encode())
    except OSError as error:
        terminalreporter.write_line(
            f"modelhealth: the summary for GitHub could not be written: {error}"
        )


def commands(tests: Iterable[Test], rootdir: Path, workspace: Path) -> Iterator[str]:
    """Yield a workflow command for the first fault of each failing test, as many as are shown.

    Places are relative to `rootdir`; files outside of `workspace`, the checkout, are not named.
    """
    _, failing = _failing(tests)
    for name, fault in failing[:MOST_ANNOTATIONS]:
        place = fault.place_in(workspace, rootdir)
        where = {} if place is None else {"file": place[0], "line": str(place[1])}
        properties = where | {"title": f"{name}: {fault.culprit}"}
        said = ",".join(f"{key}={_escaped(value, ':,')}" for key, value in properties.items())
        cause = f"\nlikely cause: {fault.cause}" if fault.cause else ""
        message = f"{fault.verdict}: {fault.culprit}: {fault.message}{cause}"
        yield f"::error {said}::{_escaped(message)}"


def _failing(tests: Iterable[Test]) -> tuple[int, list[tuple[str, Fault]]]:
    """Return how many tests there are, and of each failing one its id and what fails it first."""
    from pytest_modelhealth.runs.faults import faults

    count, failing = 0, []
    for test in tests:  # a run gives one at a time, so that one is in memory
        count += 1
        first = next((fault for fault in faults(test) if fault.fails), None)
        if first is not None:
            failing.append((test["id"], first))
    return count, failing


def _escaped(text: str, signs: str = "") -> str:
    """Escape what ends a line, and `signs`: a property ends at a comma or a colon."""
    return "".join(f"%{ord(sign):02X}" if sign in f"%\r\n{signs}" else sign for sign in text)


def summary(tests: Iterable[Test], most_bytes: int) -> str:
    """Return Markdown of at most `most_bytes`: a table of the failing tests, then their texts.

    Args:
        tests: those of a run.
        most_bytes: that of the text as UTF-8.
    """
    from pytest_modelhealth.rendering.document import Document, Row
    from pytest_modelhealth.rendering.notation import Column, plural, shorten

    count, failing = _failing(tests)
    of = plural(count, "test")
    document = Document(f"Model health: no objection, {of} inspected a model")
    if failing:
        titles = ("test", "verdict", "culprit", "check", "what")
        document = Document(
            f"Model health: {len(failing):,} of {of} with a model failed",
            columns=[*map(Column, titles)],
            rows=[
                Row([name, fault.verdict, fault.label, fault.check, fault.message])
                for name, fault in failing
            ],
            most=_MOST_ROWS,
            rest=lambda _: f"{plural(len(failing), 'test')} in all",
        )
    parts = ["\n", document.markdown()]
    left = most_bytes - sum(len(part.encode()) for part in parts) - _LONGEST_REMARK
    if left < 0 or not count:
        return ""
    for index, (name, fault) in enumerate(failing):
        code = shorten(fault.text or fault.message, _LONGEST_TEXT).splitlines()
        part = f"\n{Document(name, code=code).markdown()}"
        left -= len(part.encode())
        if left < 0:
            without = plural(len(failing) - index, "failing test")
            parts.append(f"\n*The texts of {without} are left out: a summary holds no more.*\n")
            break
        parts.append(part)
    return "".join(parts)
