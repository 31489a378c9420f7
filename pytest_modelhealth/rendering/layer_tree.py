"""Layers as a tree, in which siblings that are alike stand once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pytest_modelhealth.settings.setting import ancestors

Row = Mapping[str, Any]

LONGEST_PERIOD = 8
"""Of siblings in turns (linear, norm, ReLU, linear, ...) so many are taken for one block."""
_NAMES = frozenset({"name", "label", "shared", "reason"})


@dataclass
class Branch:
    """A layer with those in it.

    Args:
        row: what is known of it.
        inside: the layers in it, in execution order.
        entered: when it was called first, or the first of those in it; infinite if none was.
    """

    row: dict[str, Any] = field(default_factory=dict)
    inside: list[Branch] = field(default_factory=list)
    entered: float = math.inf

    @cached_property
    def likeness(self) -> tuple[Any, ...]:
        """What two layers that are alike have in common, names left out."""
        own = tuple(value for key, value in self.row.items() if key not in _NAMES)
        return own, tuple(branch.likeness for branch in self.inside)

    def walk(self) -> Iterator[Branch]:
        """Yield this and all in it, each before those in it."""
        stack = [self]
        while stack:
            branch = stack.pop()
            yield branch
            stack += reversed(branch.inside)


@dataclass(frozen=True)
class Alike:
    """Stands for siblings that are like those before.

    Args:
        depth: how deep they lie.
        first, last: names of the first and the last of them.
        times: how often what stands before comes again.
        layers: how many layers are left out, those inside among them.
    """

    depth: int
    first: str
    last: str
    times: int
    layers: int


def grown(names: Sequence[str]) -> dict[str, str | None]:
    """Return the layer that each lies in next, of those that there are; ``None`` for a root."""
    there = set(names)
    return {
        name: next((outer for outer in ancestors(name) if outer in there), None) for name in names
    }


def shown(roots: Sequence[Branch], depth: int | None) -> Iterator[Row | Alike]:
    """Yield what to show of a tree: rows, each before those in it, and what stands for others."""
    place = 0
    while place < len(roots):
        period, times = _repeated(roots, place)
        for branch in roots[place : place + period]:
            yield branch.row
            if depth is None or branch.row["depth"] < depth:
                yield from shown(branch.inside, depth)
        place += period
        others = roots[place : place + period * times]
        if others:
            names = others[0].row["label"], others[-1].row["label"]
            layers = sum(1 for branch in others for _ in branch.walk())
            yield Alike(others[0].row["depth"], *names, times, layers)
        place += len(others)


def _repeated(siblings: Sequence[Branch], place: int) -> tuple[int, int]:
    """Return how many siblings from here on come again, and how often after the first time.

    Two alike are no burden: a block has to come three times to stand once.
    """
    best = (1, 0)
    for period in range(1, LONGEST_PERIOD + 1):
        end = place + period
        while end < len(siblings) and siblings[end].likeness == siblings[end - period].likeness:
            end += 1
        times = (end - place) // period - 1
        if times >= 2 and period * times > best[0] * best[1]:
            best = period, times
    return best
