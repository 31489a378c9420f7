"""`Flow`: who feeds whom in one run, as recorded; how to ask it, in a few words.

A vertex is a call of a layer, an operation between layers, or a source: the batch, a parameter, a
buffer, a constant. Every question is a sweep over the vertices, so its cost is linear in them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from itertools import chain, islice
from typing import TypeVar

from pytest_modelhealth.report.flow.graph import (
    LOSS,
    OUTPUT,
    By,
    Call,
    Cut,
    Ending,
    Graph,
    Kind,
    Operation,
    Vertex,
)
from pytest_modelhealth.report.flow.index import Index
from pytest_modelhealth.report.flow.recurrence import Recurrence, cut_recurrences

T = TypeVar("T")
_MOST_SHOWN = 3


class Flow(Index):
    """Who feeds whom in one run.

    Layers are asked for by name; so are sources (``"input 0"``, names of parameters and buffers)
    and the two ends, ``"output"`` and ``"loss"``. A layer that holds others stands for all inside.
    A name that nothing of this run has raises `LayerNotFoundError`, which tells the nearest.
    Where questions go `by` ``"value"`` or ``"gradient"``, the second is along those ways alone on
    which gradients go back; anything else raises `InspectionError`.
    ``str(flow)`` is a line a layer.

    Args:
        make: makes the graph, when it is first asked for.
    """

    @property
    def notes(self) -> tuple[str, ...]:
        """Where the graph is not exact, and why; empty where it is."""
        return self.graph.notes

    @property
    def is_exact(self) -> bool:
        """Whether everything that passed was seen."""
        return not self.graph.notes

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The layers that ran and hold no other that ran, in order of their first call."""
        calls = enumerate(self.graph.calls)
        return tuple(dict.fromkeys(call.layer for number, call in calls if call.last == number))

    @cached_property
    def _order(self) -> dict[str, int]:
        return {name: place for place, name in enumerate((*self.layers, OUTPUT, LOSS))}

    @property
    def inputs(self) -> tuple[str, ...]:
        """The tensors of the batch, in order: ``"input 0"``."""
        return tuple(dict.fromkeys(v.name for v in self.graph.vertices if v.kind is Kind.INPUT))

    def __reduce__(self) -> tuple[Callable[[Graph], Flow], tuple[Graph]]:
        return _rebuilt, (self.graph,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Flow) and self.graph == other.graph

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        graph = self.graph
        exact = "exact" if self.is_exact else "partial"
        return f"<flow of {len(graph.calls):,} calls, {len(graph.vertices):,} vertices, {exact}>"

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, str) and layer in self.values

    def calls(self, layer: str) -> tuple[Call, ...]:
        """Return the calls of `layer`, in order; none for a source."""
        return tuple(self.graph.calls[number] for number in self.calls_of(layer))

    def line(self, layer: str) -> str:
        """Return ``path:line`` of the user's code that first called `layer`; ``""`` if unknown."""
        return next((call.line for call in self.calls(layer)), "")

    def producers(self, layer: str, *, as_it_is: bool = False) -> tuple[str, ...]:
        """Return the layers and sources whose values come to `layer` with no layer in between.

        Args:
            layer: name of a layer or source.
            as_it_is: only those of which it is called with all values, in another layout at most.
        """
        if as_it_is:
            return tuple(dict.fromkeys(self._given_as_it_is(layer)))
        inside, vertices = self.inside(layer), self.graph.vertices
        start = {n for n in inside if self.is_end(layer) and self.homes[n] is not None}
        given = {operand for n in inside - start for operand in vertices[n].operands}
        met = self.walk(start | given - inside, "to operations", back=True)
        names = (self.homes[number] for number in sorted(met))
        return tuple(dict.fromkeys(name for name in names if name not in (None, layer)))

    def _given_as_it_is(self, layer: str) -> Iterator[str]:
        for number in self.calls_of(layer):
            around = self.around(number)
            for given in self.graph.calls[number].inputs:
                held = self.as_it_is(given, "whole")
                makers = (self.homes[v] or self.container(v, around, max) for v in held)
                yield from islice((name for name in makers if name not in (None, layer)), 1)

    def consumers(
        self, layer: str, *, as_it_is: bool = False, shifted: bool = False
    ) -> tuple[str, ...]:
        """Return the layers and ends that take values of `layer` with no layer in between.

        Args:
            layer: name of a layer or source.
            as_it_is: only those that are called with all its values, in another layout at most.
            shifted: those, and what is called with a sum of them and constants or buffers.
        """
        if as_it_is or shifted:
            numbers, calls = self.calls_of(layer), self.graph.calls
            start = {o for n in numbers for o in calls[n].outputs} or self.inside(layer)
            holding = self.walk(start, "shifted" if shifted else "whole")
            given = sorted({n for v in holding for n in self._given_to.get(v, ())})
            since = min(numbers, default=-1)
            taking = (calls[n] for n in given if n > since and calls[n].last == n)
            names = [call.layer for call in taking if call.layer != layer]
            return tuple(dict.fromkeys((*names, *self.ends(holding))))
        given_out = self.given_out(layer)
        met = self._following(given_out) - self.inside(layer)
        between = {vertex for vertex in met if self.homes[vertex] is None}
        found = {home for vertex in met if (home := self.homes[vertex]) is not None}
        found.update(self.ends(given_out | between))
        return tuple(sorted(found - {layer}, key=lambda name: self._order.get(name, -1)))

    def _following(self, start: Collection[int]) -> set[int]:
        """Return what takes values of `start`, up to and with the next layers."""
        ways = self.ways()
        return self.walk({t for vertex in start for t in ways[vertex]}, "from operations")

    def operations(self, source: str, *targets: str) -> tuple[Vertex, ...]:
        """Return the operations on the ways from `source` to `targets` with no layer in between.

        In the order in which they ran; empty too where no such way leads there.
        """
        start, vertices = self.given_out(source), self.graph.vertices
        between = {n for n in self._following(start) - start if self.homes[n] is None}
        goal = set[int]().union(*map(self.inside, targets))
        goal.update(operand for number in list(goal) for operand in vertices[number].operands)
        found = between & self.walk(goal, back=True, through=between)
        return tuple(vertices[number] for number in sorted(found))

    def reach(self, *layers: str, by: By = "value") -> frozenset[str]:
        """Return the layers and ends that values of one of `layers` get to.

        A layer that holds others is among them if what it returns is.
        """
        start = self.given_out(*layers)
        reached = self.walk(start, by)
        since = min((n for layer in layers for n in self.calls_of(layer)), default=0)
        calls = (call for call in self.graph.calls if call.last >= since)  # they may hold one
        holding = {call.layer for call in calls if not reached.isdisjoint(call.outputs)}
        names = self.names_of(reached - start) | holding
        return frozenset(names.difference(layers).union(self.ends(reached)))

    @cached_property
    def used(self) -> frozenset[str]:
        """The layers and sources whose values get to the output or the loss."""
        return frozenset(self.names_of(self.walk(chain(*self._ends.values()), back=True)))

    def feeding(self, *layers: str, by: By = "value") -> frozenset[str]:
        """Return the layers and sources whose values get to one of `layers` or ends."""
        own = set[int]().union(*(self.inside(name) for name in layers if not self.is_end(name)))
        goal = own.union(*map(self.inside, layers))
        return frozenset(self.names_of(self.walk(goal, by, back=True) - own).difference(layers))

    def sweep(
        self,
        pass_on: Callable[[str, T | None], T | None],
        join: Callable[[T, T], T],
        *,
        back: bool = False,
        by: By = "value",
    ) -> dict[str, T]:
        """Return what comes to each layer and source of what those before it pass on.

        One sweep answers for all of them. The largest value of a `number` next to each layer::

            flow.sweep(lambda layer, came: number.get(layer, came), max)

        Args:
            pass_on: given a name and what comes to it, what goes on from there; where nothing
                comes that is ``None``, and returned it lets nothing on. A layer that holds others
                stands where it returns what was made in it; operations pass on what comes.
            join: makes one of what comes by two ways.
            back: from the ends to the sources: what those after a layer pass back to it.
        """
        vertices, before = self.graph.vertices, self.ways(by, back=not back)
        homes, named, calls = self.homes, self.named, [vertex.call for vertex in vertices]
        came: list[T | None] = [None] * len(vertices)
        passed: list[T | None] = [None] * len(vertices)
        found: dict[str, T] = {}
        for number in reversed(range(len(vertices))) if back else range(len(vertices)):
            value, home, call = None, homes[number], calls[number]
            for other in before[number]:
                given = passed[other]
                if home is not None and call == calls[other] and home == homes[other]:
                    given = came[other]  # of one call of a layer
                if given is not None:
                    value = given if value is None else join(value, given)
            came[number] = value
            for name in reversed(named[number]) if back else named[number]:
                if value is not None:
                    found[name] = join(found[name], value) if name in found else value
                value = pass_on(name, value)
            passed[number] = value
        return found

    def cut_between(self, source: str, target: str = LOSS) -> tuple[Cut, ...]:
        """Return where gradients end on the ways from `source` to `target`.

        Empty where one way lets gradients through, and where no way leads there at all.
        """
        cuts = self.cut_ways(self.given_out(source), self.inside(target))
        return tuple(dict.fromkeys(cuts or ()))

    def endings(self, names: Collection[str]) -> dict[str, Ending]:
        """Return for each of `names`, to which no gradient comes, where its way ends, and by what.

        Its way goes on until gradients come in again, behind a cut, or nothing takes what was
        made. What ran nowhere is left out.

        Args:
            names: names of layers that hold no other, and of parameters.
        """
        vertices, used = self.graph.vertices, self.walk(chain(*self._ends.values()), back=True)
        takers, learning = self.ways(), self.ways("gradient")
        last: list[str | None] = [None] * len(vertices)  # of `names`, on the way from a vertex
        cut: list[tuple[int, int] | None] = [None] * len(vertices)  # what cuts, and what it takes
        cut_by: dict[tuple[int, int], set[int]] = {}
        latest: dict[str, int] = {}
        for number in range(len(vertices) - 1, -1, -1):
            for taker in takers[number]:
                if taker not in used and number in used:
                    continue
                passes = vertices[number].live and taker in learning[number]
                if passes or not vertices[taker].live:
                    last[number] = last[number] or last[taker]
                if vertices[number].live:
                    cut[number] = cut[number] or (cut[taker] if passes else (taker, number))
            home, edge = self.homes[number], cut[number]
            if edge is not None:
                cut_by.setdefault(edge, set()).add(number)
            if home is not None and home in names:
                last[number] = last[number] or home
                seen = latest.setdefault(home, number)
                latest[home] = max(seen, number, key=lambda v: (v in used, vertices[v].live, v))
        cuts = {edge: self.cut(*edge, cut_by[edge]) for v in latest.values() if (edge := cut[v])}
        ends = {name: last[number] or name for name, number in latest.items()}
        edges = {name: cut[latest[end]] for name, end in ends.items()}
        return {n: Ending(end, cuts[e] if (e := edges[n]) else None) for n, end in ends.items()}

    def cut_recurrences(self) -> tuple[Recurrence, ...]:
        """Return the layers that get values of what they gave before, each time without gradients.

        They are called three times or more, and no gradient goes from one call to the next, nor
        beside it. Of layers that lie in each other, the outermost.
        """
        return tuple(cut_recurrences(self))

    def branch(self, layer: str) -> frozenset[str]:
        """Return `layer` and the layers whose values get to an end of the run through it alone."""
        inside, ends = self.inside(layer), chain(*self._ends.values())
        outside = set(range(len(self.graph.vertices))) - inside
        free = self.walk(ends, back=True, through=outside) - inside
        feeding = {self.homes[vertex] for vertex in self.walk(inside, back=True)}
        others = {self.homes[vertex] for vertex in free}
        return frozenset(name for name in feeding - others if name is not None) | {layer}

    def own_operations(self, layer: str) -> tuple[Operation, ...]:
        """Return the operations of the first call of `layer` that are its own code's, in order.

        Those of layers inside are theirs; what only lays values out anew is left out.
        """
        found = []
        for number in self.calls_of(layer)[:1]:
            call, around = self.graph.calls[number], self.around(number)
            returned = self.walk(call.outputs, back=True)
            for made in self._made_in.get(number, ()):
                vertex = self.graph.vertices[made]
                cuts = self.cuts(vertex)
                if vertex.kind is Kind.OPERATION and (cuts or not vertex.has("view")):
                    operands = tuple(self.operand(o, call, around) for o in vertex.operands)
                    shown = vertex.function, operands, vertex.line, cuts, made in returned
                    found.append(Operation(*shown))
        return tuple(found)

    def is_added(self, name: str) -> bool:
        """Whether what a layer or source gives goes, scaled at most, into a sum with more."""
        vertices, ways = self.graph.vertices, self.ways()
        way = self.walk(self.values.get(name, ()), "scaled")
        sums = {taker for v in way for taker in ways[v] if vertices[taker].has("sum")}
        others = {operand for taker in sums for operand in vertices[taker].operands} - way
        return not all(self.is_fixed[other] for other in others)

    def after(self, *vertices: int) -> frozenset[int]:
        """Return the numbers of the vertices that values of these get to, and of these."""
        return frozenset(self.walk(vertices))

    def is_alike(self, one: int, other: int) -> bool:
        """Whether two vertices were made by the same operations and layers of the same values.

        In another layout at most, with a gradient or without; numbers that operations take beside
        their operands are not known, nor is what is drawn at random.
        """
        return self.first_alike[one] == self.first_alike[other]

    def is_gated(self, layer: str) -> bool:
        """Whether values of `layer` are multiplied by others before the next layer."""
        vertices, ways = self.graph.vertices, self.ways()
        held = self.walk(self.given_out(layer), "viewed")
        made = {n for one in held for n in ways[one] if self.homes[n] is None}
        return any(vertices[n].has("product") and len({*vertices[n].operands} - held) for n in made)

    def last_of(self, *layers: str, by: By = "value") -> tuple[str, ...]:
        """Return those of `layers` that feed no other of them; of a loop, the last to run."""
        ways, goal = self.ways(by, back=True), set[int]().union(*map(self.inside, layers))
        before = self.walk({o for vertex in goal for o in ways[vertex]}, by, back=True)
        return tuple(n for n in layers if max(self.values.get(n, ()), default=-1) not in before)

    def __str__(self) -> str:
        layers = (*self.layers, *([] if self.graph.loss is None else [LOSS]))
        return "\n".join([*(f"partial: {note}" for note in self.notes), *map(self._line, layers)])

    def _line(self, layer: str) -> str:
        """Return the last few that feed a layer, and the operations that do more than lay out."""
        feeding = self.producers(layer)
        sources = feeding[-_MOST_SHOWN:]
        made = {v: None for source in sources for v in self.operations(source, layer)}
        by = dict.fromkeys(v.function for v in made if self.cuts(v) or not v.has("view"))
        left_out = len(feeding) - len(sources)
        shown = [*sources, *([f"{left_out} before them"] if left_out else [])]
        return f"{layer} <- {', '.join(shown) or 'nothing'}{' by ' if by else ''}{', '.join(by)}"


def _rebuilt(graph: Graph) -> Flow:
    return Flow(lambda: graph)
