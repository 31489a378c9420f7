"""Which snapshots syrupy may take for unused: those of test files of which every test ran.

It loads without torch, as pytest asks at the end of every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import syrupy.session
from syrupy.data import SnapshotCollections
from syrupy.report import SnapshotReport


class _Report(SnapshotReport):
    """Has what no test used by fewer names: syrupy would delete, or fail the run for, the others.

    A test that was skipped with its module, left out by ``-k`` or ``::``, or not come to because of
    an error used nothing.
    """

    partial: ClassVar[frozenset[Path] | None] = None

    @cached_property
    def unused(self) -> SnapshotCollections:
        """What no test used, of ``.health`` files where all tests of the test file ran."""
        partial, found = self.partial, SnapshotCollections()
        ran = {nodeid for nodeid, status in self.selected_items.items() if status.value}
        idle = {one.path for one in self.collected_items if one.nodeid not in ran}
        for unused in super().unused:
            path = Path(unused.location)  # tests/__snapshots__/test_net/test_drift.health
            file = path.parents[2] / f"{path.parent.name}.py"
            is_whole = partial is not None and {file, *file.parents}.isdisjoint(partial | idle)
            if path.suffix != ".health" or is_whole:
                found.add(unused)
        return found


@contextmanager
def judged(partial: frozenset[Path] | None) -> Iterator[None]:
    """Have syrupy judge what was unused.

    Args:
        partial: test files, and folders of them, that were not collected whole; ``None`` where
            no file is known to be.
    """
    theirs: Any = syrupy.session  # no public name lets another class judge
    usual = theirs.SnapshotReport
    theirs.SnapshotReport, _Report.partial = _Report, partial
    try:
        yield
    finally:
        theirs.SnapshotReport = usual
