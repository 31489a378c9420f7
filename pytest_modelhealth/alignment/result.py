"""The outcome of an alignment: every layer of both models in one pair, and why it is there.

And what is read of a layer for it, be its record of a run or of a line of a snapshot.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from pytest_modelhealth.report import UNCALLED, LayerRecord, Status
from pytest_modelhealth.settings.setting import ancestors
from pytest_modelhealth.statistics import TensorStatistics

MOST_PARTS = 8  # so many parts of a layer are named


def listed(names: Sequence[str], most: int = 3) -> str:
    """Spell names in a row: ``a, b, c and 2 more``."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
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
class Reason:
    """Why a layer is not simply one of the other side: of one layer and of several."""

    # ``"folded"``: the candidate's one layer has taken over several that came after it in the
    # reference, the last of which gave what it gives. ``"split"``: the reference's one layer is
    # several of the candidate, ``"fused"``: several of the reference are one of the candidate, by
    # the rows of their parameters or by their calls. ``"unseen"``: nothing watches it inside a
    # candidate of compiled or scripted code
    word: str
    whole: str = ""  # name of the one layer
    parts: tuple[str, ...] = ()  # the names of the several, in order
    # whether nothing inside the candidate is seen, rather than no functional layer
    is_all: bool = False

    def is_of_part(self, pair: Pair) -> bool:
        """Whether a layer is one of the several."""
        if self.word == "folded":
            return pair.reference in self.parts
        on_this_side = (pair.reference is None) is (self.word == "split")
        return self.word in ("split", "fused") and on_this_side

    def note(self, pair: Pair) -> str:
        """Return what it means for one of the layers; ``""`` where it is so of all layers."""
        if self.word == "unseen":
            what = "a functional layer, which cannot be seen in the candidate"
            return "" if self.is_all else what
        if self.is_of_part(pair):
            return f"is {'folded into' if self.word == 'folded' else 'a part of'} {self.whole}"
        several = listed(self.parts, MOST_PARTS)
        if self.word == "folded":
            return f"has {several} folded into it"
        return f"is {'fused from' if self.word == 'fused' else 'split into'} {several}"


@dataclass(frozen=True)
class Pair:
    """One layer on both sides."""

    reference: str | None  # its name in the reference; ``None`` where it was inserted
    candidate: str | None  # its name in the candidate; ``None`` where it was removed
    # what became of it. Of several, the first that holds of: retyped, moved, renamed
    change: Change
    reason: Reason | None = None  # what explains the change, where something does

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
            is_part = self.reason.is_of_part(self) and self.reason.word != "folded"
            return "part" if is_part else self.reason.word
        is_on_one_side = not self.aligned or self.candidate == self.reference
        return str(self.change) if is_on_one_side else str(self.candidate)

    @property
    def folded_in(self) -> tuple[str, ...]:
        """The layers of the reference that its own has taken over."""
        is_host = self.reason is not None and self.reason.word == "folded" and not self.is_folded
        return self.reason.parts if self.reason is not None and is_host else ()

    @property
    def output_of(self) -> str | None:
        """The layer of the reference whose outputs the candidate's are, where that is another."""
        return self.folded_in[-1] if self.folded_in else None

    @property
    def is_out_of_sight(self) -> bool:
        """Whether it may well be in the candidate, inside of which nothing is seen."""
        return self.reason is not None and self.reason.is_all

    @property
    def is_folded(self) -> bool:
        """Whether another layer has taken it over."""
        reason = self.reason
        return reason is not None and reason.word == "folded" and reason.is_of_part(self)


@dataclass(frozen=True)
class Alignment:
    """Every layer of both models, each in one pair."""

    # in execution order of the reference; inserted layers stand where they run, layers that were
    # never called come last
    pairs: tuple[Pair, ...]
    splits: tuple[Reason, ...]  # layers that were cut into several, or fused into one
    reference: Mapping[str, LayerRecord] = field(repr=False)  # the layers of the reference by name
    candidate: Mapping[str, LayerRecord] = field(repr=False)  # those of the candidate
    # of layers that are not called equally often, which call of the candidate is which of the
    # reference: the layer and the number of the call, from 0
    calls: Mapping[tuple[str, int], tuple[str, int]] = field(default_factory=dict)

    @cached_property
    def to_candidate(self) -> dict[str, str]:
        """The candidate's name of each aligned layer, by the reference's."""
        return {ours.name: theirs.name for _, ours, theirs in self.aligned}

    @cached_property
    def aligned(self) -> tuple[tuple[Pair, LayerRecord, LayerRecord], ...]:
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


def kind(layer: LayerRecord) -> str:
    """Return what a layer computes: `F.relu` and `nn.ReLU` are of one kind."""
    return layer.activation or layer.type_name


def order(layer: LayerRecord) -> float:
    """Return the place of a layer in execution order; those never called come last."""
    return math.inf if layer.entered is None else layer.entered


def is_inert(layer: LayerRecord) -> bool:
    """Whether a layer gives what it takes, or is never called."""
    idle = layer.status == Status.ALIAS_OF_INPUT or layer.status in UNCALLED
    return idle or layer.type_name == "Identity"


Fingerprint = tuple[int, int, str, str]


def fingerprint(parameter: TensorStatistics) -> Fingerprint:
    """Return a key of the values of a parameter, transposed or not."""
    extremes = f"{parameter.min:.4e}", f"{parameter.max:.4e}"
    return parameter.count, parameter.zero_count, *extremes


def fingerprints(layer: LayerRecord) -> tuple[Fingerprint, ...]:
    """Return a key of the values of a layer's parameters; empty where it has none."""
    return tuple(sorted(map(fingerprint, layer.parameters.values())))


def containers(names: Iterable[str]) -> frozenset[str]:
    """Return the names of the layers that others lie in."""
    return frozenset(above for name in names for above in ancestors(name))
