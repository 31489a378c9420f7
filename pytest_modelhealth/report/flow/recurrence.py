"""Recurrences that are cut: layers that get what they gave before, each time without gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from pytest_modelhealth.report.flow.graph import Call, Cut
from pytest_modelhealth.report.flow.index import Index, walk

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
        numbers = [n for n in index.calls_of(call.layer) if calls[n].parent == call.parent]
        if number in repeated or len(numbers) < _FEWEST:
            continue
        for again in numbers:
            repeated.update(range(again, calls[again].last + 1))
        alike = [calls[again] for again in numbers]
        cuts = [cut for one, other in pairwise(alike) if (cut := _cut(index, one, other))]
        beside = zip(alike, numbers[1:], alike[2:], strict=False)
        if len(cuts) == len(alike) - 1 and not any(_is_passed_by(index, *one) for one in beside):
            yield Recurrence(call.layer, len(alike), tuple(cuts), _takes_more(index, alike))


def _cut(index: Index, first: Call, second: Call) -> Cut | None:
    """Return where gradients end from one call to the next, ``None`` where they pass.

    The second call may cut off itself what it is given.
    """
    vertices, start = index.graph.vertices, set(first.outputs)
    for goal in (second.inputs, second.outputs):
        last = max(goal, default=-1)
        live = index.forward(start, "gradient", last=last)
        if not live.isdisjoint(goal):
            continue
        way = index.forward(start, "value", last=last)
        for number in sorted(way & index.backward(goal, first=min(start, default=0)) - live):
            for place, operand in enumerate(vertices[number].operands):
                if operand in live and not vertices[number].passes_gradient(place):
                    return index.cut(number, operand, live)
        return None
    return None


def _is_passed_by(index: Index, first: Call, second: int, third: Call) -> bool:
    """Whether gradients go from before the second call to what the third gets, beside it."""
    vertices, start = index.graph.vertices, set(first.outputs)
    end = max(index.graph.calls[second].inputs, default=-1)
    way = index.forward(start, "value", last=max(third.inputs, default=-1))
    way &= index.backward(third.inputs, first=min(start, default=0))
    return any(
        vertices[number].passes_gradient(place) and vertices[operand].live
        for number in way - index.inside_call(second)
        for place, operand in enumerate(vertices[number].operands)
        if operand <= end < number and operand in way
    )


def _takes_more(index: Index, calls: list[Call]) -> bool:
    """Whether calls take something of their own beside what came of the first: steps, parts."""
    vertices = index.graph.vertices
    made = index.forward(set(calls[0].outputs), "value", last=max(calls[-1].inputs))
    entries = set[frozenset[int]]()
    for before, last, call in zip(calls, calls[1:], calls[2:], strict=False):
        since, begin = (min(one.outputs, default=0) for one in (before, last))

        def onward(number: int, since: int = since, begin: int = begin) -> tuple[int, ...]:
            # what the call before made is not gone into
            is_own = number > (begin if number in made else since)
            return vertices[number].operands if is_own else ()

        own = walk(call.inputs, onward) - made
        if any(vertices[number].has("slice") for number in own):
            return True
        entries.add(frozenset(number for number in own if number < since))
    return len(entries) > 1
