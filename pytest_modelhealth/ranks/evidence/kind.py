"""`Kind`: one thing in which ranks may differ; each has a file in this folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from pytest_modelhealth.capture import Request
from pytest_modelhealth.ranks.company import Company
from pytest_modelhealth.ranks.evidence.wrappers import Wrapped
from pytest_modelhealth.report import Observation
from pytest_modelhealth.report.ranks import Disagreement

Cards = Mapping[int, Any]
"""What each rank noted, by its number."""


class Kind(ABC):
    """One thing in which ranks may differ, or may not differ although they should.

    It is made before the run, when it notes what it needs. After the run each rank writes a card,
    and every rank reads all cards.

    Args:
        company: who inspects together.
        wrapped: the model and what wraps it.
        request: what is run.
    """

    name: ClassVar[str]
    """Name of the check that judges it."""

    def __init__(self, company: Company, wrapped: Wrapped, request: Request) -> None:
        self.company = company
        self.wrapped = wrapped
        self.place = company.place

    def close(self) -> None:
        """Take back what it hung on the model for the run, which ended or failed."""
        return

    @abstractmethod
    def card(self, own: Observation) -> Any:
        """Return what this rank tells the others, picklable and small.

        Args:
            own: what this rank saw. Collectives among `place.tensor` may run here.
        """

    @abstractmethod
    def found(self, cards: Cards, joint: Observation) -> Iterable[Disagreement]:
        """Yield where ranks disagree; the same on every rank.

        Args:
            cards: what `card` returned, by rank.
            joint: what all ranks saw, put together.
        """


def same_of_others(cards: Mapping[int, tuple[int, tuple[int, ...]]]) -> list[tuple[int, ...]]:
    """Return the ranks that have the same number, 0 for none, and are not meant to.

    Args:
        cards: by rank, a number and the ranks that rightly have the same.
    """
    having: dict[int, dict[int, tuple[int, ...]]] = {}
    for rank, (number, beside) in cards.items():
        if number:
            having.setdefault(number, {})[rank] = beside
    return sorted(tuple(ranks) for ranks in having.values() if len(set(ranks.values())) > 1)


def in_order(names: Iterable[str], joint: Observation) -> tuple[str, ...]:
    """Return layers once each, in execution order."""
    places = {name: place for place, name in enumerate(joint.layers)}
    return tuple(sorted(dict.fromkeys(names), key=lambda name: places.get(name, len(places))))


def alike(cards: Cards) -> list[tuple[int, ...]]:
    """Return the ranks with equal cards together; the most first, of as many the lowest ranks."""
    groups: dict[Any, list[int]] = {}
    for rank, card in cards.items():
        groups.setdefault(card, []).append(rank)
    return sorted((tuple(ranks) for ranks in groups.values()), key=lambda r: (-len(r), r))


def listed(name: str, count: int, what: str = "parameter") -> str:
    """Return ``"'a.weight' and 2 more parameters"``: the first by name, the others by number."""
    first = repr(name.lstrip("."))
    return first if count == 1 else f"{first} and {counted(count - 1, f'more {what}')}"


def counted(count: int, noun: str) -> str:
    """Return ``"1 sample"`` or ``"12 samples"``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
