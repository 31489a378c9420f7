"""Causes that need no numbers: a layer called more or less often, a weight tied or no longer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from pytest_modelhealth.comparison.alignment import Alignment, Pair
from pytest_modelhealth.report import LayerRecord, Status

Records = Mapping[str, LayerRecord]


@dataclass(frozen=True)
class CallChange:
    """A layer that is called more or less often.

    Args:
        pair: the layer; the outermost of several, one in the other, that changed alike.
        phrase: what became of its calls: ``"called twice, was once"``.
        inside: the names in the reference of the layer and of all inside it.
        more: whether it is called more often.
        both: whether it is called in both.
    """

    pair: Pair
    phrase: str
    inside: frozenset[str]
    more: bool
    both: bool

    def __str__(self) -> str:
        return f"{self.pair.name}: {self.phrase}"


@dataclass(frozen=True)
class TieChange:
    """A parameter that was one of another layer and no longer is, or is now.

    Args:
        pair: the later layer, in the order of registration, of the two that share it.
        parameter: its own name there.
        owner: the other layer.
        phrase: ``"no longer tied to embedding.weight"``.
    """

    pair: Pair
    parameter: str
    owner: Pair
    phrase: str

    @property
    def label(self) -> str:
        """The full name of the parameter."""
        return ".".join(filter(None, (self.pair.name, self.parameter)))

    def __str__(self) -> str:
        return f"{self.label}: {self.phrase}"


@dataclass(frozen=True)
class Causes:
    """What became of calls and ties between two models.

    Args:
        alignment: which layer is which.
        reference: the layers of the reference.
        candidate: those of the candidate.
    """

    alignment: Alignment
    reference: Records
    candidate: Records

    @cached_property
    def phrases(self) -> dict[str, str]:
        """What became of the calls of each aligned layer, by its name in the reference."""
        return {pair.name: self._call_phrase(pair) for pair in self._aligned()}

    @cached_property
    def calls(self) -> tuple[CallChange, ...]:
        """Every layer that is called more or less often, in execution order of the reference."""
        phrases = self.phrases
        found: list[CallChange] = []
        for pair in sorted(
            self._aligned(), key=lambda pair: pair.name.count(".") if pair.name else -1
        ):
            phrase, name = phrases[pair.name], pair.name
            if not phrase or not name or any(name in one.inside for one in found):
                continue
            inside = {other for other in phrases if other.startswith(f"{name}.")}
            alike = all(phrases[other] or not self._is_called(other) for other in inside)
            if alike:
                was, now = self._calls(pair)
                every = frozenset({name, *inside})
                found.append(CallChange(pair, phrase, every, now > was, min(was, now) > 0))
        order = {pair: place for place, pair in enumerate(self.alignment.pairs)}
        return tuple(sorted(found, key=lambda one: order[one.pair]))

    @cached_property
    def ties(self) -> tuple[TieChange, ...]:
        """Every parameter that is no longer tied to one of another layer, or is now."""
        to, back = self.alignment.by_reference, self.alignment.by_candidate
        lost = self._broken(self.reference, self.candidate, to, "candidate", "no longer tied to")
        gained = self._broken(self.candidate, self.reference, back, "reference", "now tied to")
        return tuple(chain(lost, gained))

    def _aligned(self) -> list[Pair]:
        return [pair for pair in self.alignment.pairs if pair.aligned]

    def _records(self, pair: Pair) -> tuple[LayerRecord, LayerRecord]:
        return self.reference[pair.reference or ""], self.candidate[pair.candidate or ""]

    def _calls(self, pair: Pair) -> tuple[int, int]:
        x, y = self._records(pair)
        return x.calls, y.calls

    def _is_called(self, name: str) -> bool:
        return any(self._calls(self.alignment.by_reference[name]))

    def _call_phrase(self, pair: Pair) -> str:
        """Return what became of the calls of a layer; ``""`` where as much went through it.

        So it does where a batch is taken in parts. What ran unseen was called, if not by hooks.
        """
        x, y = self._records(pair)
        if x.calls == y.calls or Status.OPAQUE in (x.status, y.status):
            return ""
        if pair.note or (not y.calls and y.parameter_gradients):
            return ""
        if not y.calls:
            return "no longer called"
        if not x.calls:
            return "" if x.parameter_gradients else "now called, was not"
        seen = x.activations, y.activations
        if seen[0] is not None and seen[1] is not None and seen[0].count == seen[1].count:
            return ""
        return called(x.calls, y.calls)

    def _broken(
        self, ours: Records, theirs: Records, pairs: Mapping[str, Pair], side: str, verb: str
    ) -> Iterator[TieChange]:
        """Yield each tie of one side that the other has two parameters for."""
        for layer, record in ours.items():
            for own, full in record.tied.items():
                owner, _, name = full.rpartition(".")
                one, other = pairs.get(layer), pairs.get(owner)
                if one is None or other is None or not (one.aligned and other.aligned):
                    continue
                here, there = getattr(one, side), getattr(other, side)
                known = theirs[here], theirs[there]
                separate = own in known[0].parameters or own in known[0].tied
                if (
                    separate
                    and (name in known[1].parameters or name in known[1].tied)
                    and _owner(known[0], own) != _owner(known[1], name)
                ):
                    phrase = f"{verb} {'.'.join(filter(None, (other.name, name)))}"
                    yield TieChange(one, own, other, phrase)


def called(before: int, now: int) -> str:
    """Spell how often a layer is called, and was: ``called twice, was once``."""
    before_times, now_times = ({1: "once", 2: "twice"}.get(n, f"{n} times") for n in (before, now))
    return f"called {now_times}, was {before_times}"


def _owner(record: LayerRecord, own: str) -> str:
    """Return the full name of a parameter at the first layer that has it."""
    return record.tied.get(own, f"{record.name}.{own}" if record.name else own)
