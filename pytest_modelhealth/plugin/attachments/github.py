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

from pytest_modelhealth.wings import wing

if TYPE_CHECKING:
    from pytest_modelhealth.runs.run import Run, Test

MOST_ANNOTATIONS = 10  # GitHub shows no more errors of a step
MOST_BYTES = 1024 * 1024  # and drops its summary where that is longer


def pytest_modelhealth_wants_run() -> bool:
    """Ask for the run, as GitHub reads what is said of it."""
    return True


def pytest_modelhealth_run_ended(
    config: pytest.Config, run: Run, terminalreporter: pytest.TerminalReporter
) -> None:
    """Annotate the culprits, and append to the summary; a file that cannot be written is named."""
    workspace = Path(os.environ.get("GITHUB_WORKSPACE") or config.rootpath)
    for line in commands(run.tests, config.rootpath, workspace):
        terminalreporter.write_line(line)
    try:
        with Path(os.environ.get("GITHUB_STEP_SUMMARY") or os.devnull).open("ab") as file:
            summary = wing("runs.faults:summary")(run, MOST_BYTES - file.tell())
            file.write(summary.encode())
    except OSError as error:
        told = f"modelhealth: the summary for GitHub could not be written: {error}"
        terminalreporter.write_line(told)


def commands(tests: Iterable[Test], rootdir: Path, workspace: Path) -> Iterator[str]:
    """Yield a workflow command for the first fault of each failing test, as many as are shown.

    Places are relative to `rootdir`; files outside of `workspace`, the checkout, are not named.
    """
    for name, fault in wing("runs.faults:failing")(tests)[1][:MOST_ANNOTATIONS]:
        place = fault.place_in(workspace, rootdir)
        where = {} if place is None else {"file": place[0], "line": str(place[1])}
        properties = where | {"title": f"{name}: {fault.culprit}"}
        said = ",".join(f"{key}={_escaped(value, ':,')}" for key, value in properties.items())
        cause = f"\nlikely cause: {fault.cause}" if fault.cause else ""
        message = f"{fault.verdict}: {fault.culprit}: {fault.message}{cause}"
        yield f"::error {said}::{_escaped(message)}"


def _escaped(text: str, signs: str = "") -> str:
    """Escape what ends a line, and `signs`: a property ends at a comma or a colon."""
    return "".join(f"%{ord(sign):02X}" if sign in f"%\r\n{signs}" else sign for sign in text)
