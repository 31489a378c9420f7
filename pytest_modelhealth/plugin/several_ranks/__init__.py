"""Tests on several ranks: each rank a process that runs pytest with this one test.

Nothing here is imported before a test is marked.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest


class Wanted(NamedTuple):
    """On how many ranks a test runs, and after how many seconds they are ended."""

    size: int
    seconds: float


WANTED = pytest.StashKey[Wanted]()
"""What the mark of a test asks for."""


def write_no_snapshots(config: pytest.Config) -> None:
    """Have a rank that is not the first compare syrupy's snapshots, and record none."""
    session = getattr(config, "_syrupy", None)
    if session is not None:
        session.queue_snapshot_write = lambda **_: None
