"""Tests on several ranks: each rank a process that runs pytest with this one test.

Nothing here is imported before a test is marked.
"""

from __future__ import annotations

import pytest


def write_no_snapshots(config: pytest.Config) -> None:
    """Have a rank that is not the first compare syrupy's snapshots, and record none."""
    session = getattr(config, "_syrupy", None)
    if session is not None:
        session.queue_snapshot_write = lambda **_: None
