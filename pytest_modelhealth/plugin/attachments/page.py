"""What the tests of the run inspected as a page, under ``--modelhealth-html PATH``."""

from __future__ import annotations

from typing import TYPE_CHECKING, TextIO

import pytest

from pytest_modelhealth.plugin.output_files import OutputFile

if TYPE_CHECKING:
    from pytest_modelhealth.runs.run import Run


def _write(run: Run, file: TextIO, config: pytest.Config) -> None:
    from pytest_modelhealth.runs import page  # brings torch

    page.write(run, file)


DESTINATION = OutputFile(
    "--modelhealth-html",
    "page",
    "write what every test inspected to PATH, as one HTML file that opens without a network",
    _write,
)
