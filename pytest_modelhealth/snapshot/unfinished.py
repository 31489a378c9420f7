"""Tests of a run that did not pass: `--snapshot-update` deletes no snapshot of theirs.

syrupy deletes what no test used, and a test that failed early, or never ran because of Ctrl-C or
``-x``, used nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import PurePosixPath

_UNFINISHED: ContextVar[tuple[frozenset[str], list[str]]] = ContextVar("UNFINISHED")
"""The tests of the run that is about to end, and the snapshots that were kept for them."""


def keeps(test: str) -> bool:
    """Return whether a snapshot is of one of these tests, and remember it then.

    Args:
        test: what its file says: the id, and which of several snapshots of the test it is.
    """
    tests, kept_ones = _UNFINISHED.get((frozenset(), []))
    found = any(test == one or test.startswith(f"{one} ") for one in tests)
    if found:
        kept_ones.append(test)
    return found


def own_id(node_id: str) -> str:
    """Return the id of a test as its snapshots hold it: without the folder, in which they lie."""
    path, _, name = node_id.partition("::")
    return f"{PurePosixPath(path).name}::{name}"


@contextmanager
def kept(node_ids: Iterable[str]) -> Iterator[list[str]]:
    """Keep the snapshots of these tests while the context lasts; give what was kept."""
    found: list[str] = []
    token = _UNFINISHED.set((frozenset(map(own_id, node_ids)), found))
    try:
        yield found
    finally:
        _UNFINISHED.reset(token)
