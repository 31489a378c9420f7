"""Causes that need no numbers: a layer called more or less often, a weight tied or no longer.

The stories of a comparison and of a drift say them in the same words.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from pytest_modelhealth.alignment.result import Alignment, Pair
from pytest_modelhealth.report import LayerRecord, Status
from pytest_modelhealth.settings.setting import dotted, is_inside

MOST_CALLS = 3  # so many layers that are called more or less often are named in a story


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
