"""Tests on several ranks: each rank a process that runs pytest with this one test.

====================  ==============================================================
`processes`           starts and ends ranks, forked from a warm server or each by itself
`warm`                what that server has imported
`rank_process`        what a rank does and says
`running`             runs one test on its ranks and waits for them
`verdict`             makes one result of what the ranks reported
`waiting`             says where a rank is, and what it waits for
`snapshots`           takes what a rank did with snapshots to syrupy's session
`torchrun`            the same test where torchrun started pytest on each rank
====================  ==============================================================

Nothing here is imported before a test is marked.
"""

from __future__ import annotations

from typing import NamedTuple


class Wanted(NamedTuple):
    """On how many ranks a test runs, and after how many seconds they are ended."""

    size: int
    seconds: float
