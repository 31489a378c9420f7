"""What the tests of the run inspected as a page, under ``--modelhealth-html PATH``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from pytest_modelhealth.plugin.output_files import OutputFile

if TYPE_CHECKING:
    from pytest_modelhealth.runs.run import Run

_FILE = OutputFile(
    "--modelhealth-html",
    "page",
    "write what every test inspected to PATH, as one HTML file that opens without a network",
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
    if not _FILE.is_wanted(config):
        return
    from pytest_modelhealth.runs import page

    _FILE.write(config, lambda file: page.write(run, file), terminalreporter)
