"""run an inspection again that failed: python -m pytest_modelhealth replay DIR

DIR is a folder that pytest --modelhealth-replay wrote; the failure text has the command. The test
runs again, with the state, batch and random numbers of then. The exit status is 0 if all is well,
1 if it still fails, 2 if it cannot be run.
"""

from __future__ import annotations

import argparse
import pkgutil
from pathlib import Path
from typing import Any

from pytest_modelhealth.errors import InspectionError

_HEALTHY, _FAILS = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("path", type=Path, metavar="DIR", help="the folder of the inspection")
    parser.add_argument(
        "--model",
        metavar="MODULE:NAME",
        help="run it without its test, on the model that this function or class makes without "
        "arguments",
    )
    parser.add_argument(
        "--loss",
        metavar="MODULE:NAME",
        help="with --model, the loss, where it was a function of your own",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run it again, and return 0 if all is well, else 1.

    Raises:
        InspectionError: it cannot be run; the message says why.
    """
    if arguments.model is None:
        if arguments.loss is not None:
            raise InspectionError("--loss goes with --model; the test has its own")
        from pytest_modelhealth.bundles.replaying import run_test

        return _HEALTHY if run_test(arguments.path) else _FAILS
    from pytest_modelhealth.bundles.replaying import replay

    model = _named(arguments.model, "--model")
    loss = None if arguments.loss is None else _named(arguments.loss, "--loss")
    report = replay(arguments.path, model, loss=loss)
    print(report.render("failure"))  # noqa: T201
    return _HEALTHY if report._failure() is None else _FAILS


def _named(spelled: str, option: str) -> Any:
    """Return what a user names as ``package.module:name``.

    Raises:
        InspectionError: there is none.
    """
    if ":" not in spelled:
        raise InspectionError(f"{option} takes MODULE:NAME, such as models:make, not {spelled!r}")
    try:
        return pkgutil.resolve_name(spelled)
    except (ImportError, AttributeError, ValueError) as error:
        raise InspectionError(f"{option} {spelled}: {type(error).__name__}: {error}") from None
