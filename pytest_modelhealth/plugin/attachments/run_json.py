"""What the tests of the run inspected as data, under ``--modelhealth-json PATH``.

``docs/reference/run-format.md`` has its keys.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import pytest

from pytest_modelhealth.plugin import output_files

if TYPE_CHECKING:
    from pytest_modelhealth.runs.run import Run

_OPTION = "--modelhealth-json"
_PATH = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option."""
    parser.getgroup("modelhealth").addoption(
        _OPTION,
        metavar="PATH",
        default=None,
        help="write what every test inspected to PATH, as JSON; python -m pytest_modelhealth diff "
        "compares two such files",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Look at the path now, so that a long run does not end without its data.

    Raises:
        pytest.UsageError: it cannot be written.
    """
    path = output_files.path_of(config, _OPTION)
    if path is not None:
        config.stash[_PATH] = path


def pytest_modelhealth_wants_run(config: pytest.Config) -> bool:
    """Return whether the option was given."""
    return _PATH in config.stash


def pytest_modelhealth_run_ended(
    config: pytest.Config, run: Run, terminalreporter: pytest.TerminalReporter
) -> None:
    """Write the file."""
    path = config.stash.get(_PATH, None)
    if path is not None:
        output_files.write(path, "run data", run, write_json, terminalreporter)


def write_json(run: Run, file: TextIO) -> None:
    """Write the run as strict JSON (RFC 8259) in ASCII, a test a line, one at a time."""
    entries = [f"{_json(key)}: {_json(value)}" for key, value in run.head.items()]
    file.write("{\n" + ",\n".join(entries) + ',\n"tests": [')
    separator = "\n"
    for test in run.tests:
        file.write(separator + _json(dict(test)))
        separator = ",\n"
    file.write("\n]}\n")


def _json(value: object) -> str:
    return json.dumps(value, allow_nan=False)
