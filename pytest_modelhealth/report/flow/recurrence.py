"""Recurrences that are cut: layers that get what they gave before, each time without gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pytest_modelhealth.report.flow.graph import AS_IT_IS, WHOLE, Call, Cut
from pytest_modelhealth.report.flow.index import Index, walk

_FEWEST = 3
_PARTS = AS_IT_IS - WHOLE - {"expand", "expand_as"}


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
        if number in repeated:
            continue
        alike = [n for n in index.calls_of(call.layer) if calls[n].parent == call.parent]
        if len(alike) < _FEWEST:
            continue
        for again in alike:
            repeated.update(range(again, calls[again].last + 1))
        found = _recurrence(index, alike)
        if found is not None:
            yield found


def _recurrence(index: Index, numbers: list[int]) -> Recurrence | None:
    calls = [index.graph.calls[number] for number in numbers]
    cuts: list[Cut] = []
    steps: list[_Step] = []
    for place in range(len(calls) - 1):
        step = _Step(index, calls[place], calls[place + 1], numbers[place + 1])
        cut = step.cut() if step.way else None
        if cut is None or (place + 2 < len(calls) and step.is_passed_by(calls[place + 2])):
            return None
        cuts.append(cut)
        steps.append(step)
    made = index.forward(set(calls[0].outputs), "value", last=max(calls[-1].inputs))
    own = [step.own(min(calls[place].outputs), made) for place, step in enumerate(steps[1:])]
    more = any(has_parts for _, has_parts in own) or len({entries for entries, _ in own}) > 1
    return Recurrence(calls[0].layer, len(calls), tuple(cuts), more)


class _Step:
    """The way from one call of a layer to the next."""

    def __init__(self, index: Index, first: Call, second: Call, number: int) -> None:
        self._index = index
        self._begin = min(first.outputs, default=0)
        self._end = max(second.inputs, default=-1)
        self._outputs, self._inputs = set(first.outputs), set(second.inputs)
        self._second = index.inside_call(number)
        self._returned = set(second.outputs)
        self._last = max(second.outputs, default=-1)
        self._after = index.forward(self._outputs, "value", last=self._end)
        self.way = self._after & index.backward(self._inputs, first=self._begin)

    def cut(self) -> Cut | None:
        """Return where gradients end on the way, ``None`` where they pass, or none begin.

        The second call may cut off itself what it is given.
        """
        vertices = self._index.graph.vertices
        live = self._index.forward(self._outputs, "gradient", last=self._end)
        way = self.way
        if not live.isdisjoint(self._inputs):
            live = self._index.forward(self._outputs, "gradient", last=self._last)
            if not self._returned or not live.isdisjoint(self._returned):
                return None
            way = self._index.forward(self._outputs, "value", last=self._last)
            way &= self._index.backward(self._returned, first=self._begin)
        for number in sorted(way - live):
            for position, operand in enumerate(vertices[number].operands):
                if operand in live and not vertices[number].passes_gradient(position):
                    return self._index.cut(number, operand, live)
        return None

    def is_passed_by(self, third: Call) -> bool:
        """Whether gradients go from before the second call to what the third gets, beside it."""
        vertices, last = self._index.graph.vertices, max(third.inputs, default=-1)
        before = self._index.backward(set(third.inputs), first=self._begin)
        way = before & self._index.forward(self._outputs, "value", last=last)
        return any(
            vertices[number].passes_gradient(position) and vertices[operand].live
            for number in way
            if number > self._end and number not in self._second
            for position, operand in enumerate(vertices[number].operands)
            if operand <= self._end and operand in way
        )

    def own(self, since: int, made: set[int]) -> tuple[frozenset[int], bool]:
        """Return from what before the step the second call takes, and whether it takes parts.

        Args:
            since: the vertex that the step begins with: what the call before the two returned.
            made: what came of the first call of all.
        """
        vertices = self._index.graph.vertices
        taken = [
            *self._inputs,
            *(o for v in self.way - self._outputs for o in vertices[v].operands),
        ]

        def onward(number: int) -> Iterable[int]:
            return vertices[number].operands if number > since and number not in made else ()

        met = walk(taken, onward) - made
        entries = frozenset(number for number in met if number < since)
        return entries, any(vertices[number].function in _PARTS for number in met)
