"""Write a test file for a model: python -m pytest_modelhealth init package.module:Model

The model is a class, a function that makes one, or an instance. It is built, a batch for it is
guessed, it is inspected under a few seeds, and a file is written that tests it. A file that exists
is never written over. Exit status: 0 where the file was written, 2 where it could not be.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("model", metavar="MODULE:NAME", help="a class, factory or instance")
    parser.add_argument(
        "--batch",
        metavar="MODULE:NAME",
        help="a function that makes the batch: inputs, or a tuple (inputs, target) or "
        "(inputs, target, loss)",
    )
    parser.add_argument(
        "--seeds",
        type=int,
        default=3,
        metavar="N",
        help="inspect the model under so many seeds (default: 3)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the file to write; default: test_NAME_health.py, in tests/ where there is one",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write the file, and say what it holds.

    Raises:
        InspectionError: nothing could be written; the message says why, and what to do.
    """
    from pytest_modelhealth.commands.first_test.session import write_first_test

    for line in write_first_test(
        arguments.model, arguments.batch, arguments.seeds, arguments.output
    ):
        print(line)  # noqa: T201
    return 0
