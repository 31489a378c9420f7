"""What the tests of the run inspected as a page, under ``--modelhealth-html PATH``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from pytest_modelhealth.plugin import output_files

if TYPE_CHECKING:
    from pytest_modelhealth.runs.run import Run

_OPTION = "--modelhealth-html"
_PATH = pytest.StashKey[Path]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option."""
    parser.getgroup("modelhealth").addoption(
        _OPTION,
        metavar="PATH",
        default=None,
        help="write what every test inspected to PATH, as one HTML file that opens without a "
        "network",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Look at the path now, so that a long run does not end without its page.

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
    if path is None:
        return
    from pytest_modelhealth.runs import page

    output_files.write(path, "page", run, page.write, terminalreporter)
