"""Annotations and the step's summary under GitHub Actions: a line at the culprit, and a table.

Commands and their escapes are those of
https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands.
"""

from __future__ import annotations

import html
import os
from collections.abc import Iterable, Iterator
from itertools import islice
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
    failing = 0
    for failing, (test, fault) in enumerate(_failing(tests), 1):
        if failing > MOST_ANNOTATIONS:
            continue
        place = fault.place_in(workspace, rootdir)
        where = {} if place is None else {"file": place[0], "line": str(place[1])}
        properties = where | {"title": f"{test['id']}: {fault.culprit}"}
        said = ",".join(f"{key}={_property(value)}" for key, value in properties.items())
        cause = f"\nlikely cause: {fault.cause}" if fault.cause else ""
        message = f"{fault.verdict}: {fault.culprit}: {fault.message}{cause}"
        yield f"::error {said}::{_data(message)}"
    if failing > MOST_ANNOTATIONS:
        yield f"modelhealth: annotated {MOST_ANNOTATIONS} of {failing} tests: GitHub shows no more"


def _failing(tests: Iterable[Test]) -> Iterator[tuple[Test, Fault]]:
    """Yield each failing test with what fails it first."""
    from pytest_modelhealth.runs.faults import faults

    for test in tests:
        first = next((fault for fault in faults(test) if fault.fails), None)
        if first is not None:
            yield test, first


def _data(text: str) -> str:
    """Escape what stands behind the second pair of colons."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """Escape what stands between the commas."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")


# The summary.


def summary(tests: Iterable[Test], most_bytes: int) -> str:
    """Return Markdown of at most `most_bytes`: a table of the failing tests, then their texts.

    Names are text that anybody may have written: whatever comes from a test stands in code, where
    Markdown, HTML and mentions mean nothing.

    Args:
        tests: those of a run; gone through several times.
        most_bytes: that of the text as UTF-8.
    """
    from pytest_modelhealth.rendering.notation import plural

    count, failing = sum(1 for _ in tests), sum(1 for _ in _failing(tests))
    of = plural(count, "test")
    if not count:
        return ""
    if failing:
        text = f"\n### Model health: {failing:,} of {of} with a model failed\n\n"
    else:
        text = f"\n### Model health: no objection\n\n{of} inspected a model.\n\n"
    cut = "\n*The texts of {:,} failing tests are left out: a summary holds no more.*\n\n"
    left = most_bytes - len((text + cut.format(failing)).encode())
    if left < 0:
        return ""
    for shown, block in enumerate(_blocks(tests) if failing else (), -1):
        left -= len(block.encode())
        if left < 0:
            return text + cut.format(failing - max(0, shown))
        text += block
    return text


def _blocks(tests: Iterable[Test]) -> Iterator[str]:
    """Yield the table, then the text of each failing test."""
    from pytest_modelhealth.rendering.notation import printable, shorten

    table = "| test | verdict | culprit | check | what |\n| --- | --- | --- | --- | --- |\n"
    for test, fault in islice(_failing(tests), _MOST_ROWS):
        said = (test["id"], fault.verdict, fault.label, fault.check, fault.message)
        table += f"| {' | '.join(_code(text) for text in said)} |\n"
    yield f"{table}\n"
    for test, fault in _failing(tests):
        lines = (printable(line) for line in (fault.text or fault.message).splitlines())
        text = html.escape(shorten("\n".join(lines), _LONGEST_TEXT))
        title = f"<details><summary>{_code(test['id'])}</summary>"
        yield f"{title}\n\n<pre>{text}</pre>\n\n</details>\n\n"


def _code(text: str) -> str:
    """Return `text` as inline code in which each sign that could be markup is an entity."""
    from pytest_modelhealth.rendering.notation import printable, shorten

    shown = shorten(printable(text), 500)
    signs = (f"&#{ord(sign)};" if sign in punctuation else sign for sign in shown)
    return f"<code>{''.join(signs)}</code>" if shown else ""
