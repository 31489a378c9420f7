"""Make a page of the file of a run.

The page is the one that pytest writes under --modelhealth-html, made of what it wrote under
--modelhealth-json.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from pytest_modelhealth.errors import InspectionError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the two files."""
    parser.add_argument(
        "source", metavar="RUN", type=Path, help="file of a run, written by --modelhealth-json"
    )
    parser.add_argument("target", metavar="PAGE", type=Path, help="HTML file to write")


def run(arguments: argparse.Namespace) -> int:
    """Write the page.

    Raises:
        InspectionError: the run cannot be read, or the page cannot be written.
    """
    from pytest_modelhealth.runs import page  # brings torch
    from pytest_modelhealth.runs.reading import read, using

    written = io.StringIO()
    with using(arguments.source):
        page.write(read(arguments.source), written)
    try:
        arguments.target.write_text(written.getvalue(), encoding="ascii")
    except OSError as error:
        raise InspectionError(
            f"cannot write to {str(arguments.target)!r}: {error.strerror}; name a file in a folder "
            "that exists and can be written to"
        ) from None
    print(f"page in {arguments.target}")  # noqa: T201
    return 0
