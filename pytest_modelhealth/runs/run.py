"""`Run`: what the tests of a run inspected, as plain data, and reading it from its file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pytest_modelhealth.errors import InspectionError

FORMAT = "pytest-modelhealth run"
FORMAT_VERSION = 2  # raised when a key changes its name or meaning

GRAVITY = {  # how bad each verdict is, the worst first; an unknown one stands in the middle
    **dict.fromkeys(("unhealthy", "different", "drifted", "missing", "failed"), 2),
    **dict.fromkeys(("inconclusive",), 1),
    **dict.fromkeys(("recorded", "healthy", "equivalent", "unchanged"), 0),
}

FAILED = ("failed", "error")  # the outcomes of a test that is to be repaired

Test = Mapping[str, Any]
"""A test and its results, by the keys of the file of a run."""


@dataclass(frozen=True)
class Run:
    """A run of tests.

    Args:
        head: all but the tests, by the keys of the file of a run.
        tests: in the order in which they ended; may be iterated over again and again, and is read
            from disk each time where it is large.
        is_lost: whether there were results, and none is left: a file of an earlier run is worth
            more than what could be written.
    """

    head: Mapping[str, Any]
    tests: Iterable[Test]
    is_lost: bool = False


_WRITE = "pytest --modelhealth-json=PATH"


def read(path: str | os.PathLike[str]) -> Run:
    """Return the run that a file holds; whether it holds all that is needed shows in `using`.

    Raises:
        InspectionError: it cannot be read, or holds no run that this version knows.
    """
    try:
        content = Path(path).read_bytes()
        data = json.loads(content, parse_constant=_refuse)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InspectionError(f"{path}: {reason}; a run is written by {_WRITE}") from None
    except (ValueError, RecursionError) as error:
        # cut off, not in UTF-8, a NaN, a number of thousands of digits, or brackets without end
        raise InspectionError(
            f"{path}: not JSON of a run, or only a part of it: {error}; {_WRITE} writes one"
        ) from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InspectionError(
            f"{path}: not the file of a run, whose 'format' is {FORMAT!r}; {_WRITE} writes one"
        )
    version = data.get("format_version")
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:
        raise InspectionError(
            f"{path}: written in version {version!r} of the format; this pytest-modelhealth reads "
            f"up to version {FORMAT_VERSION}: upgrade it, or write the file anew: {_WRITE}"
        )
    with using(path):
        return Run({key: value for key, value in data.items() if key != "tests"}, data["tests"])


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


@contextmanager
def using(*paths: Any) -> Iterator[None]:
    """Make one sentence of what comes of a file that lacks a key, or has another type under it.

    Raises:
        InspectionError: the body stumbled over what the files hold.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InspectionError(
            f"{' or '.join(map(str, paths))}: a key is missing or of another type ({error!r}); "
            f"write the file anew: {_WRITE}"
        ) from error
