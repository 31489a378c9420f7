"""Recurrences that are cut: layers that get what they gave before, each time without gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from pytest_modelhealth.report.flow.graph import Call, Cut
from pytest_modelhealth.report.flow.index import Index

_FEWEST = 3


@dataclass(frozen=True)
class Recurrence:
    """A layer each of whose calls gets values of the call before, and none a gradient of them.

    Args:
        layer: its name.
        calls: how many there are.
        cuts: where gradients end from a call to the next, one for each call but the last.
        takes_more: whether each call takes something of its own, too, as the steps of a sequence.
    """

    layer: str
    calls: int
    cuts: tuple[Cut, ...]
    takes_more: bool


def cut_recurrences(index: Index) -> Iterator[Recurrence]:
    """Yield those of three calls or more, of layers in each other the outermost."""
    repeated: set[int] = set()  # the calls that are one of several of a layer, or lie in one
    calls = index.graph.calls
    for number, call in enumerate(calls):
        of_layer = index.calls_of(call.layer)  # of most it is one
        numbers = [n for n in of_layer if calls[n].parent == call.parent] if of_layer[1:] else []
        if number in repeated or len(numbers) < _FEWEST:
            continue
        for again in numbers:
            repeated.update(range(again, calls[again].last + 1))
        alike = [calls[again] for again in numbers]
        cuts = [cut for one, other in pairwise(alike) if (cut := _cut(index, one, other))]
        beside = zip(alike, numbers[1:], alike[2:], strict=False)
        if len(cuts) == len(alike) - 1 and not any(_is_passed_by(index, *one) for one in beside):
            yield Recurrence(call.layer, len(alike), tuple(cuts), _takes_more(index, alike))


def _window(start: Iterable[int], goal: Iterable[int]) -> range:
    """Return the vertices from the first of `start` to the last of `goal`."""
    return range(min(start, default=0), max(goal, default=-1) + 1)


def _cut(index: Index, first: Call, second: Call) -> Cut | None:
    """Return where gradients end from one call to the next, ``None`` where they pass.

    The second call may cut off itself what it is given.
    """
    for goal in (second.inputs, second.outputs):
        cuts = index.cut_ways(first.outputs, goal, _window(first.outputs, goal))
        if cuts is not None:
            return next(iter(cuts), None)
    return None


def _is_passed_by(index: Index, first: Call, second: int, third: Call) -> bool:
    """Whether gradients go from before the second call to what the third gets, beside it."""
    vertices, window = index.graph.vertices, _window(first.outputs, third.inputs)
    end = max(index.graph.calls[second].inputs, default=-1)
    way = index.walk(first.outputs, through=window)
    way &= index.walk(third.inputs, back=True, through=window)
    return any(
        vertices[number].passes_gradient(place) and vertices[operand].live
        for number in way - index.inside_call(second)
        for place, operand in enumerate(vertices[number].operands)
        if operand <= end < number and operand in way
    )


def _takes_more(index: Index, calls: list[Call]) -> bool:
    """Whether calls take something of their own beside what came of the first: steps, parts."""
    vertices, start = index.graph.vertices, calls[0].outputs
    made = index.walk(start, through=_window(start, calls[-1].inputs))
    entries = set[frozenset[int]]()
    for before, last, call in zip(calls, calls[1:], calls[2:], strict=False):
        since, begin = (min(one.outputs, default=0) for one in (before, last))
        # what the call before made is not gone into
        window = _window((since + 1,), call.inputs)
        through = [n for n in window if n > (begin if n in made else since)]
        own = index.walk(call.inputs, back=True, through=through) - made
        if any(vertices[number].has("slice") for number in own):
            return True
        entries.add(frozenset(number for number in own if number < since))
    return len(entries) > 1
