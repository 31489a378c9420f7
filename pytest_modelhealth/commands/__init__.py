"""The shelf of commands, ``python -m pytest_modelhealth NAME``: one a file, found by itself.

A command is a module with a docstring, whose first line is its help, and two functions:
``add_arguments(parser)``, and ``run(arguments)``, which returns the exit status.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from pytest_modelhealth.errors import InspectionError, SettingsError

WRONG_USE = 2
"""Exit status where what was given cannot be used, as `argparse` has it."""


def main(arguments: Sequence[str]) -> int:
    """Run the command that `arguments` name, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m pytest_modelhealth")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name in sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py")):
        module = importlib.import_module(f"{__name__}.{name}")
        text = str(module.__doc__)
        command = commands.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    given = parser.parse_args(arguments)
    try:
        return int(given.run(given))
    except (InspectionError, SettingsError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)  # noqa: T201
        return WRONG_USE
