"""What the tests of the run inspected as a page, under ``--modelhealth-html PATH``."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

from pytest_modelhealth.plugin.output_files import OutputFile

if TYPE_CHECKING:
    import pytest

    from pytest_modelhealth.runs.run import Run

_FILE = OutputFile(
    "--modelhealth-html",
    "page",
    "write what every test inspected to PATH, as one HTML file that opens without a network",
)

pytest_addoption = _FILE.add_option
pytest_configure = _FILE.prepare
pytest_modelhealth_wants_run = _FILE.is_wanted


def pytest_modelhealth_run_ended(
    config: pytest.Config, run: Run, terminalreporter: pytest.TerminalReporter
) -> None:
    """Write the file."""

    def write(file: TextIO) -> None:
        from pytest_modelhealth.runs import page  # brings torch

        page.write(run, file)

    _FILE.write(config, write, terminalreporter)
