"""Tests of a run that did not pass: `--snapshot-update` deletes no snapshot of theirs.

syrupy deletes what no test used, and a test that failed early, or never ran because of Ctrl-C or
``-x``, used nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import PurePosixPath


@dataclass(frozen=True)
class Unfinished:
    """Tests that did not pass.

    Args:
        tests: their ids, as their snapshots hold them.
        kept: what was not deleted, since it is theirs.
    """

    tests: frozenset[str] = frozenset()
    kept: list[str] = field(default_factory=list)

    def keeps(self, test: str) -> bool:
        """Return whether a snapshot is of one of these tests, and remember it then.

        Args:
            test: what its file says: the id, and which of several snapshots of the test it is.
        """
        found = any(
            test.removeprefix(one)[:1] in ("", " ") for one in self.tests if test.startswith(one)
        )
        if found:
            self.kept.append(test)
        return found


NONE = Unfinished()
UNFINISHED: ContextVar[Unfinished] = ContextVar("UNFINISHED", default=NONE)
"""The tests of the run that is about to end."""


def own_id(node_id: str) -> str:
    """Return the id of a test as its snapshots hold it: without the folder, in which they lie."""
    path, _, name = node_id.partition("::")
    return f"{PurePosixPath(path).name}::{name}"


@contextmanager
def kept(node_ids: Iterable[str]) -> Iterator[list[str]]:
    """Keep the snapshots of these tests while the context lasts; give what was kept."""
    unfinished = Unfinished(frozenset(map(own_id, node_ids)))
    token = UNFINISHED.set(unfinished)
    try:
        yield unfinished.kept
    finally:
        UNFINISHED.reset(token)
