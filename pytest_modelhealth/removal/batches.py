"""Parts batches into those on which units are found and those on which they are proven."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import length_hint
from typing import Any

HELD_OUT = 5
"""One in so many batches is held out."""

_MOST_KEPT = 8
"""Batches that are kept for the proof where nobody knows how many there are."""


def parted(batches: Iterable[Any], total: int) -> Iterator[tuple[Any, bool]]:
    """Yield batches, each with whether it is held out: the last fifth, and one at least.

    Where their number is not known, the last one is held out and some of those before, which are
    kept and come again at the end.

    Args:
        batches: batches.
        total: how many there are; 0 where nobody knows.
    """
    first_held_out = total - -(-total // HELD_OUT) if total else None
    kept: list[Any] = []
    latest: list[Any] = []  # held back until it is known that it is not the last
    for index, batch in enumerate(batches):
        for before in latest:
            if first_held_out is not None:
                yield before, index > first_held_out
            elif index % HELD_OUT == 0 and len(kept) < _MOST_KEPT:
                kept.append(before)
            else:
                yield before, False
        latest = [batch]
    for batch in (*kept, *latest):
        yield batch, True


def count(batches: Iterable[Any], most: int | None) -> int:
    """Return how many batches there are, at most so many; 0 where nobody knows."""
    try:
        known = length_hint(batches)
    except Exception:  # noqa: BLE001 - a loader of the user's
        return 0
    return known if most is None else min(known, most)
