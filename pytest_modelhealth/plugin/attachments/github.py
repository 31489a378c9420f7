"""Annotations and the step's summary under GitHub Actions: a line at the culprit, and a table.

Commands and their escapes are those of
https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands.
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from string import punctuation
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
_MOST_ROWS = 200


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
    """Yield a workflow command for the first fault of each failing test.

    Args:
        tests: those of a run.
        rootdir: the folder that its places are relative to.
        workspace: the checkout; files outside of it cannot be annotated.
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
    if len(failing) > MOST_ANNOTATIONS:
        of = f"{MOST_ANNOTATIONS} of {len(failing)} tests"
        yield f"modelhealth: annotated {of}: GitHub shows no more"


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

    Names are text that anybody may have written: whatever comes from a test stands in code, where
    Markdown, HTML and mentions mean nothing.

    Args:
        tests: those of a run.
        most_bytes: that of the text as UTF-8.
    """
    from pytest_modelhealth.rendering.notation import plural, printable, shorten

    count, failing = _failing(tests)
    of = plural(count, "test")
    if failing:
        text = f"\n### Model health: {len(failing):,} of {of} with a model failed\n\n"
    else:
        text = f"\n### Model health: no objection\n\n{of} inspected a model.\n\n"
    cut = "\n*The texts of {:,} failing tests are left out: a summary holds no more.*\n\n"
    left = most_bytes - len((text + cut.format(len(failing))).encode())
    if left < 0 or not count:
        return ""
    table = "| test | verdict | culprit | check | what |\n| --- | --- | --- | --- | --- |\n"
    for name, fault in failing[:_MOST_ROWS]:
        said = (name, fault.verdict, fault.label, fault.check, fault.message)
        table += f"| {' | '.join(map(_code, said))} |\n"
    blocks = [f"{table}\n"] * bool(failing)
    for name, fault in failing:
        lines = "\n".join(map(printable, (fault.text or fault.message).splitlines()))
        told = f"<pre>{html.escape(shorten(lines, _LONGEST_TEXT))}</pre>"
        blocks.append(f"<details><summary>{_code(name)}</summary>\n\n{told}\n\n</details>\n\n")
    for shown, block in enumerate(blocks, -1):
        left -= len(block.encode())
        if left < 0:
            return text + cut.format(len(failing) - max(0, shown))
        text += block
    return text


def _code(text: str) -> str:
    """Return `text` as inline code in which each sign that could be markup is an entity."""
    from pytest_modelhealth.rendering.notation import printable, shorten

    shown = shorten(printable(text), 500)
    signs = (f"&#{ord(sign)};" if sign in punctuation else sign for sign in shown)
    return f"<code>{''.join(signs)}</code>" if shown else ""
