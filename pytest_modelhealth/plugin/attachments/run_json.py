"""What the tests of the run inspected as data, under ``--modelhealth-json PATH``.

``docs/reference/run-format.md`` has its keys.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, TextIO

import pytest

from pytest_modelhealth.plugin.output_files import OutputFile

if TYPE_CHECKING:
    from pytest_modelhealth.runs.run import Run

_FILE = OutputFile(
    "--modelhealth-json",
    "run data",
    "write what every test inspected to PATH, as JSON; python -m pytest_modelhealth diff compares "
    "two such files",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option."""
    _FILE.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Look at the path.

    Raises:
        pytest.UsageError: it cannot be written.
    """
    _FILE.prepare(config)


def pytest_modelhealth_wants_run(config: pytest.Config) -> bool:
    """Return whether the option was given."""
    return _FILE.is_wanted(config)


def pytest_modelhealth_run_ended(
    config: pytest.Config, run: Run, terminalreporter: pytest.TerminalReporter
) -> None:
    """Write the file."""
    if _FILE.is_wanted(config):
        _FILE.write(config, lambda file: write_json(run, file), terminalreporter)


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
