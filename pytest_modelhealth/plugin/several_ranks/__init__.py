"""Tests on several ranks: each rank a process that runs pytest with this one test.

Nothing here is imported before a test is marked.
"""

from __future__ import annotations

from typing import NamedTuple


class Wanted(NamedTuple):
    """On how many ranks a test runs, and after how many seconds they are ended."""

    size: int
    seconds: float
