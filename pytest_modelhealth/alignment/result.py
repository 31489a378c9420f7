"""The outcome of an alignment: every layer of both models in one pair, and why it is there.

And what is read of a layer for it, be its record of a run or of a line of a snapshot. Last come the
causes that need no numbers: a layer called more or less often, a weight tied or no longer. The
stories of a comparison and of a drift say them in the same words.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from pytest_modelhealth.report import UNCALLED, LayerRecord, Status
from pytest_modelhealth.settings.setting import ancestors, dotted, is_inside
from pytest_modelhealth.statistics import TensorStatistics

MOST_PARTS = 8  # so many parts of a layer are named
MOST_CALLS = 3  # so many layers that are called more or less often are named in a story


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
    # reference, the last of which gave what it gives. ``"calls"``: its calls are those of other
    # layers. ``"unseen"``: nothing watches it inside a candidate of compiled or scripted code
    word: str
    whole: str = ""  # name of the one layer
    parts: tuple[str, ...] = ()  # the names of the several, in order
    # whether nothing inside the candidate is seen, rather than no functional layer
    is_all: bool = False

    def note(self, pair: Pair) -> str:
        """Return what it means for one of the layers; ``""`` where it is so of all layers."""
        several = listed(self.parts, MOST_PARTS)
        if self.word == "unseen":
            what = "a functional layer, which cannot be seen in the candidate"
            return "" if self.is_all else what
        if self.word == "calls":
            return f"has the calls of {several}"
        return f"is folded into {self.whole}" if pair.is_folded else f"has {several} folded into it"


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
            return self.reason.word
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
        return reason is not None and reason.word == "folded" and self.reference in reason.parts


@dataclass(frozen=True)
class Alignment:
    """Every layer of both models, each in one pair."""

    # in execution order of the reference; inserted layers stand where they run, layers that were
    # never called come last
    pairs: tuple[Pair, ...]
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


@dataclass(frozen=True)
class Cause:
    """A layer that is called more or less often, or a parameter that is tied, or no longer."""

    # the layer; the outermost of several, one in the other, that are called otherwise; of two that
    # share a parameter, the later in the order of registration
    pair: Pair
    phrase: str  # ``"called twice, was once"``, ``"no longer tied to embedding.weight"``
    inside: frozenset[str]  # the names in the reference of the layers of which it says all
    more: bool = False  # whether the layer is called more often
    parameter: str = ""  # own name of the parameter that is tied; ``""`` where it is calls
    owner: Pair | None = None  # the other layer that has it

    @property
    def label(self) -> str:
        """The name of the layer, or the full one of the parameter."""
        return dotted(self.pair.name, self.parameter)

    def __str__(self) -> str:
        return f"{self.label}: {self.phrase}"


class Causes:
    """What became of calls and ties between two models."""

    def __init__(self, alignment: Alignment) -> None:
        self._alignment = alignment
        ours = Counter(name for name, _ in alignment.calls)
        theirs = Counter(name for name, _ in alignment.calls.values())
        self.phrases = {  # of the calls of each aligned layer, by its name in the reference
            x.name: _call_phrase(pair, x, y, y.calls - theirs[y.name] + ours[x.name])
            for pair, x, y in alignment.aligned
        }

    @cached_property
    def calls(self) -> tuple[Cause, ...]:
        """Every layer that is called more or less often, in execution order of the reference."""
        outermost_first = sorted(
            self._alignment.aligned, key=lambda one: one[1].name.count(".") + bool(one[1].name)
        )
        called = {x.name for _, x, y in outermost_first if x.calls or y.calls}
        found: dict[Pair, Cause] = {}
        for pair, x, y in outermost_first:
            phrase, name = self.phrases[x.name], x.name
            if not phrase or not name or any(name in one.inside for one in found.values()):
                continue
            inside = {other for other in self.phrases if is_inside(other, name)}
            if all(self.phrases[other] or other not in called for other in inside):
                found[pair] = Cause(pair, phrase, frozenset({name, *inside}), y.calls > x.calls)
        return tuple(found[pair] for pair in self._alignment.pairs if pair in found)

    @cached_property
    def ties(self) -> tuple[Cause, ...]:
        """Every parameter that is no longer tied to one of another layer, or is now."""
        ours, theirs = self._alignment.reference, self._alignment.candidate
        to = {x.name: (pair, y) for pair, x, y in self._alignment.aligned}
        back = {y.name: (pair, x) for pair, x, y in self._alignment.aligned}
        lost = _broken(ours, to, "no longer tied to")
        gained = _broken(theirs, back, "now tied to")
        return (*lost, *gained)


def _call_phrase(pair: Pair, x: LayerRecord, y: LayerRecord, calls: int) -> str:
    """Return what became of the calls of a layer; ``""`` where as much went through it.

    So it does where a batch is taken in parts. What ran unseen was called, if not by hooks, and
    inside a transform of `torch.func` one call is of all samples. In the candidate there are as
    many `calls`, wherever they are, less those of other layers.
    """
    unseen = not {x.status, y.status}.isdisjoint((Status.OPAQUE, Status.UNSUPPORTED))
    if x.calls in (y.calls, calls) or unseen or pair.reason is not None:
        return ""
    if not calls:
        return "" if y.parameter_gradients and not y.calls else "no longer called"
    if not x.calls:
        return "" if x.parameter_gradients else "now called, was not"
    ours, theirs = x.activations, y.activations
    if ours is not None and theirs is not None and ours.count == theirs.count:
        return ""
    return called(x.calls, calls)


def _broken(
    layers: Mapping[str, LayerRecord],
    counterparts: Mapping[str, tuple[Pair, LayerRecord]],
    verb: str,
) -> Iterator[Cause]:
    """Yield each tie of one side that the other has two parameters for."""
    for layer in layers.values():
        for own, full in layer.tied.items():
            owner, _, name = full.rpartition(".")
            if layer.name not in counterparts or owner not in counterparts:
                continue
            (pair, here), (owners, there) = counterparts[layer.name], counterparts[owner]
            known = all(
                n in one.parameters or n in one.tied for one, n in ((here, own), (there, name))
            )
            first = [  # the full name at the first layer that has it
                one.tied.get(n, dotted(one.name, n)) for one, n in ((here, own), (there, name))
            ]
            if known and first[0] != first[1]:
                phrase, inside = f"{verb} {dotted(owners.name, name)}", frozenset({pair.name})
                yield Cause(pair, phrase, inside, parameter=own, owner=owners)


def called(before: int, now: int) -> str:
    """Spell how often a layer is called, and was: ``called twice, was once``."""
    before_times, now_times = ({1: "once", 2: "twice"}.get(n, f"{n} times") for n in (before, now))
    return f"called {now_times}, was {before_times}"
