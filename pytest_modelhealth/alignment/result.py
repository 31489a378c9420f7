"""The outcome of an alignment: every layer of both models in one pair, and why it is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from pytest_modelhealth.alignment.alignable import Alignable

MOST_PARTS = 8
"""So many parts of a layer are named."""


def listed(names: Sequence[str], most: int = 3) -> str:
    """Spell names in a row: ``a, b, c and 2 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


class Change(StrEnum):
    """What became of a layer between the reference and the candidate."""

    MATCHED = "matched"
    RENAMED = "renamed"
    MOVED = "moved"
    RETYPED = "retyped"
    INSERTED = "inserted"
    REMOVED = "removed"


@dataclass(frozen=True)
class Fold:
    """Layers that the one before them has taken over: a batch norm, say, and an activation.

    Args:
        layers: their names in the reference, in order; the last gave what the host gives.
        host: name in the candidate of the layer that took them over.
    """

    layers: tuple[str, ...]
    host: str
    word = "folded"

    def note(self, pair: Pair) -> str:
        """Return what it means for one of the layers."""
        if pair.reference in self.layers:
            return f"is folded into {self.host}"
        return f"has {', '.join(self.layers)} folded into it"


@dataclass(frozen=True)
class Split:
    """One layer that is several: the rows of their parameters, one below the other, or its calls.

    Args:
        whole: name of the one layer.
        parts: names of the several, in the order of the rows or calls.
        fused: whether the one is in the candidate, and the several are in the reference.
    """

    whole: str
    parts: tuple[str, ...]
    fused: bool = False

    def has_part(self, pair: Pair) -> bool:
        """Whether a layer of one side only is one of the several."""
        return (pair.reference is None) is not self.fused

    @property
    def word(self) -> str:
        """What became of the one layer, in a word."""
        return "fused" if self.fused else "split"

    def note(self, pair: Pair) -> str:
        """Return what it means for the one layer, or for one of the several."""
        if self.has_part(pair):
            return f"is a part of {self.whole}"
        parts = listed(self.parts, MOST_PARTS)
        return f"is {'fused from' if self.fused else 'split into'} {parts}"


@dataclass(frozen=True)
class Unseen:
    """A layer that nothing watches inside a candidate of compiled or scripted code.

    Args:
        is_all: whether nothing inside the candidate is seen, rather than no functional layer.
    """

    is_all: bool = False
    word = "unseen"

    def note(self, pair: Pair) -> str:
        """Return what it means for the layer; ``""`` where it is so of all layers."""
        return "" if self.is_all else "a functional layer, which cannot be seen in the candidate"


@dataclass(frozen=True)
class Pair:
    """One layer on both sides.

    Args:
        reference: its name in the reference; ``None`` where it was inserted.
        candidate: its name in the candidate; ``None`` where it was removed.
        change: what became of it. Of several, the first that holds of: retyped, moved, renamed.
        reason: what explains the change, where something does.
    """

    reference: str | None
    candidate: str | None
    change: Change
    reason: Fold | Split | Unseen | None = None

    @property
    def name(self) -> str:
        """Its name in the reference where it has one there, else in the candidate."""
        return self.candidate or "" if self.reference is None else self.reference

    @property
    def aligned(self) -> bool:
        """Whether it is on both sides."""
        return self.reference is not None and self.candidate is not None

    @property
    def note(self) -> str:
        """What explains the change, for people; ``""`` where nothing does."""
        return "" if self.reason is None else self.reason.note(self)

    @property
    def word(self) -> str:
        """What became of it, in a word; ``""`` where it is as it was."""
        if self.change is Change.MATCHED:
            return self.reason.word if self.reason else ""
        if self.reason is not None:
            is_part = isinstance(self.reason, Split) and self.reason.has_part(self)
            return "part" if is_part else self.reason.word
        is_on_one_side = not self.aligned or self.candidate == self.reference
        return str(self.change) if is_on_one_side else str(self.candidate)

    @property
    def output_of(self) -> str | None:
        """The layer of the reference whose outputs the candidate's are, where that is another."""
        if isinstance(self.reason, Fold) and self.reference not in self.reason.layers:
            return self.reason.layers[-1]
        return None

    @property
    def is_out_of_sight(self) -> bool:
        """Whether it may well be in the candidate, inside of which nothing is seen."""
        return isinstance(self.reason, Unseen) and self.reason.is_all

    @property
    def is_folded(self) -> bool:
        """Whether another layer has taken it over."""
        return isinstance(self.reason, Fold) and self.output_of is None

    @property
    def is_noted_elsewhere(self) -> bool:
        """Whether the note of another pair says all that its own does."""
        is_part = isinstance(self.reason, Split) and self.reason.has_part(self)
        return is_part or self.output_of is not None


@dataclass(frozen=True)
class Alignment:
    """Every layer of both models, each in one pair.

    Args:
        pairs: in execution order of the reference; inserted layers stand where they run, layers
            that were never called come last.
        splits: layers that were cut into several, or fused into one.
        reference: the layers of the reference by name.
        candidate: those of the candidate.
        calls: of layers that are not called equally often, which call of the candidate is which of
            the reference: the layer and the number of the call, from 0.
    """

    pairs: tuple[Pair, ...]
    splits: tuple[Split, ...]
    reference: Mapping[str, Alignable] = field(repr=False)
    candidate: Mapping[str, Alignable] = field(repr=False)
    calls: Mapping[tuple[str, int], tuple[str, int]] = field(default_factory=dict)

    @cached_property
    def to_candidate(self) -> dict[str, str]:
        """The candidate's name of each aligned layer, by the reference's."""
        return {ours.name: theirs.name for _, ours, theirs in self.aligned}

    @cached_property
    def aligned(self) -> tuple[tuple[Pair, Alignable, Alignable], ...]:
        """The pairs of layers that are on both sides, and both layers of each."""
        return tuple(
            (pair, self.reference[pair.reference], self.candidate[pair.candidate])
            for pair in self.pairs
            if pair.reference is not None and pair.candidate is not None
        )

    @cached_property
    def by_reference(self) -> dict[str, Pair]:
        """Each pair that has a layer of the reference, by its name there."""
        return {pair.reference: pair for pair in self.pairs if pair.reference is not None}

    @cached_property
    def by_candidate(self) -> dict[str, Pair]:
        """Each pair that has a layer of the candidate, by its name there."""
        return {pair.candidate: pair for pair in self.pairs if pair.candidate is not None}

    def of(self, *changes: Change) -> tuple[Pair, ...]:
        """Return the pairs with one of these changes."""
        return tuple(pair for pair in self.pairs if pair.change in changes)
