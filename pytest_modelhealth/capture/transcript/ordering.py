"""Puts groups of operations in an order in which they can run."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

_T = TypeVar("_T")
_Names = Callable[[_T], Iterable[str]]


def in_order(
    groups: Sequence[Sequence[_T]], places: Sequence[int], inputs: _Names[_T], outputs: _Names[_T]
) -> list[Sequence[_T]] | None:
    """Return groups in an order in which they can run, as near to the given one as can be.

    Args:
        groups: operations that run together.
        places: where each group stands.
        inputs: gives the names of the values that an operation takes.
        outputs: gives the names of those that it makes.

    Returns:
        ``None`` where two of them need each other.
    """
    maker = {name: at for at, group in enumerate(groups) for one in group for name in outputs(one)}
    waiting_for, needed_by = [], defaultdict(list)
    for at, group in enumerate(groups):
        needed = {maker[name] for one in group for name in inputs(one) if name in maker} - {at}
        waiting_for.append(len(needed))
        for other in needed:
            needed_by[other].append(at)
    ready = [(places[at], at) for at, count in enumerate(waiting_for) if not count]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, at = heapq.heappop(ready)
        ordered.append(groups[at])
        for other in needed_by[at]:
            waiting_for[other] -= 1
            if not waiting_for[other]:
                heapq.heappush(ready, (places[other], other))
    return ordered if len(ordered) == len(groups) else None
