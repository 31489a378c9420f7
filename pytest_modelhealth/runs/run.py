"""`Run`: what the tests of a run inspected, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

FORMAT = "pytest-modelhealth run"
FORMAT_VERSION = 2
"""Raised when a key changes its name or meaning."""

FAILED = ("failed", "error")
"""The outcomes of a test that is to be repaired."""

Test = Mapping[str, Any]
"""A test and its results, by the keys of the file of a run."""


@dataclass(frozen=True)
class Run:
    """A run of tests.

    Args:
        head: all but the tests, by the keys of the file of a run.
        tests: in the order in which they ended; may be iterated over again and again, and is read
            from disk each time where it is large.
    """

    head: Mapping[str, Any]
    tests: Iterable[Test]
