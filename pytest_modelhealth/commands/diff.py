"""Say what changed from one run to another.

Both files are written by pytest --modelhealth-json=PATH. Exit status: 0 where nothing got worse, 1
where something did (see --fail-on), 2 where the files cannot be read or compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.wings import wing

FORMATS = ("markdown", "terminal")
"""Of `runs.difference.writers`, which would load torch."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare both files and how to show what changed."""
    parser.add_argument("base", help="the run before the change")
    parser.add_argument("head", help="the run after it")
    parser.add_argument("--format", choices=FORMATS, default="terminal", help="default: terminal")
    parser.add_argument("--output", metavar="FILE", help="write to FILE rather than show it")
    parser.add_argument(
        "--fail-on",
        choices=("worse", "any", "never"),
        default="worse",
        help="exit with 1 where a test got worse (default), where anything changed, or never; "
        "worse are: a worse verdict, a new finding, a test or a result that is no longer there, "
        "a new test that fails",
    )


def run(arguments: argparse.Namespace) -> int:
    """Show the difference and return the exit status.

    Raises:
        InspectionError: a file cannot be read or written, or the runs cannot be compared.
    """
    read, using = wing("runs.run:read"), wing("runs.run:using")
    grade = wing("runs.difference.inspections:Grade")
    compare = wing("runs.difference.comparing:compare")
    with using(arguments.base, arguments.head):
        difference = compare(read(arguments.base), read(arguments.head))
        text = wing("runs.difference.writers:render")(difference, arguments.format)
    if arguments.output is None:
        encoding = sys.stdout.encoding or "utf-8"
        # a terminal that cannot show a letter shows its escape
        print(text.encode(encoding, "backslashreplace").decode(encoding), end="")  # noqa: T201
    else:
        path = Path(arguments.output)
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InspectionError(f"--output: cannot write {path}: {error.strerror}") from None
    grades = {test.grade for test in difference.tests} - {grade.SAME}
    failing = {"worse": {grade.WORSE}, "any": grades, "never": set()}[arguments.fail_on]
    return 1 if grades & failing else 0
