"""`Flow`: who feeds whom in one run, as recorded; how to ask it, in a few words.

A vertex is a call of a layer, an operation between layers, or a source: the batch, a parameter, a
buffer, a constant. Every question is a sweep over the vertices, so its cost is linear in them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import cached_property
from typing import TypeVar

from pytest_modelhealth.report.flow.graph import (
    LOSS,
    By,
    Call,
    Cut,
    Ending,
    Gate,
    Graph,
    Kind,
    Operation,
    Vertex,
)
from pytest_modelhealth.report.flow.index import Index, walk
from pytest_modelhealth.report.flow.recurrence import Recurrence, cut_recurrences
from pytest_modelhealth.report.flow.stops import endings

T = TypeVar("T")


class Flow:
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

    def __init__(self, make: Callable[[], Graph]) -> None:
        self._make = make
        self._index: Index | None = None

    @property
    def graph(self) -> Graph:
        """The record itself."""
        return self._indexed.graph

    @property
    def _indexed(self) -> Index:
        if self._index is None:
            graph = self._make()
            self._make = lambda: graph  # what made it need not be held any longer
            self._index = Index(graph)
        return self._index

    @property
    def notes(self) -> tuple[str, ...]:
        """Where the graph is not exact, and why; empty where it is."""
        return self.graph.notes

    @property
    def is_exact(self) -> bool:
        """Whether everything that passed was seen."""
        return not self.graph.notes

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that ran and hold no other that ran, in order of their first call."""
        return self._indexed.layers

    @property
    def inputs(self) -> tuple[str, ...]:
        """The tensors of the batch, in order: ``"input 0"``."""
        named = (v.name for v in self.graph.vertices if v.kind is Kind.INPUT)
        return tuple(dict.fromkeys(named))

    def __reduce__(self) -> tuple[Callable[[Graph], Flow], tuple[Graph]]:
        return _rebuilt, (self.graph,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Flow) and self.graph == other.graph

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        graph = self.graph
        exact = "exact" if self.is_exact else "partial"
        return f"<flow of {len(graph.calls):,} calls, {len(graph.vertices):,} vertices, {exact}>"

    def producers(self, layer: str, *, as_it_is: bool = False) -> tuple[str, ...]:
        """Return the layers and sources whose values come to `layer` with no layer in between.

        Args:
            layer: name of a layer or source.
            as_it_is: only those of which it is called with all values, in another layout at most.
        """
        if as_it_is:
            return tuple(dict.fromkeys(self._indexed.given_as_it_is(layer)))
        index, homes = self._indexed, self._indexed.homes
        inside, vertices = index.inside(layer), self.graph.vertices
        start = {n for n in inside if index.is_end(layer) and homes[n] is not None}
        given = (operand for n in inside - start for operand in vertices[n].operands)
        start.update(operand for operand in given if operand not in inside)
        met = walk(start, lambda n: vertices[n].operands if homes[n] is None else ())
        names = (homes[number] for number in sorted(met))
        return tuple(dict.fromkeys(name for name in names if name not in (None, layer)))

    def consumers(
        self, layer: str, *, as_it_is: bool = False, shifted: bool = False
    ) -> tuple[str, ...]:
        """Return the layers and ends that take values of `layer` with no layer in between.

        Args:
            layer: name of a layer or source.
            as_it_is: only those that are called with all its values, in another layout at most.
            shifted: those, and what is called with a sum of them and constants or buffers.
        """
        index = self._indexed
        if as_it_is or shifted:
            return tuple(dict.fromkeys(index.takers_as_it_is(layer, shifted=shifted)))
        given_out = index.given_out(layer)
        met = index.following(given_out, index.inside(layer))
        between = {vertex for vertex in met if index.homes[vertex] is None}
        found = {home for vertex in met if (home := index.homes[vertex]) is not None}
        found.update(index.ends(given_out | between))
        return tuple(sorted(found - {layer}, key=lambda name: index.order.get(name, -1)))

    def calls(self, layer: str) -> tuple[Call, ...]:
        """Return the calls of `layer`, in order; none for a source."""
        return tuple(self.graph.calls[number] for number in self._indexed.calls_of(layer))

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, str) and self._indexed.knows(layer)

    def line(self, layer: str) -> str:
        """Return ``path:line`` of the user's code that first called `layer`; ``""`` if unknown."""
        numbers = self._indexed.calls_of(layer)
        return self.graph.calls[numbers[0]].line if numbers else ""

    def operations(self, source: str, *targets: str) -> tuple[Vertex, ...]:
        """Return the operations on the ways from `source` to `targets` with no layer in between.

        In the order in which they ran; empty too where no such way leads there.
        """
        index = self._indexed
        start, vertices = index.given_out(source), self.graph.vertices
        between = {n for n in index.following(start, start) if index.homes[n] is None}
        goal = set[int]().union(*map(index.inside, targets))
        goal.update(operand for number in list(goal) for operand in vertices[number].operands)
        found = between & walk(goal, lambda n: vertices[n].operands if n in between else ())
        return tuple(vertices[number] for number in sorted(found))

    def reach(self, *layers: str, by: By = "value") -> frozenset[str]:
        """Return the layers and ends that values of one of `layers` get to.

        A layer that holds others is among them if what it returns is.
        """
        index = self._indexed
        start = set[int]().union(*map(index.given_out, layers))
        reached = index.forward(start, by)
        since = min((n for layer in layers for n in index.calls_of(layer)), default=0)
        calls = (call for call in self.graph.calls if call.last >= since)  # they may hold one
        holding = {call.layer for call in calls if not reached.isdisjoint(call.outputs)}
        names = index.names_of(reached - start) | holding
        return (names - set(layers)).union(index.ends(reached))

    @cached_property
    def used(self) -> frozenset[str]:
        """The layers and sources whose values get to the output or the loss."""
        return self._indexed.names_of(self._indexed.backward(self._indexed.all_ends))

    def feeding(self, *layers: str, by: By = "value") -> frozenset[str]:
        """Return the layers and sources whose values get to one of `layers` or ends."""
        index = self._indexed
        goal = set[int]().union(*map(index.inside, layers))
        own = set[int]().union(*(index.inside(name) for name in layers if not index.is_end(name)))
        return index.names_of(index.backward(goal, by) - own) - set(layers)

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
        index = self._indexed
        count, before = len(self.graph.vertices), index.next_to(by, back=not back)
        came: list[T | None] = [None] * count
        passed: list[T | None] = [None] * count
        found: dict[str, T] = {}
        for number in range(count - 1, -1, -1) if back else range(count):
            value = None
            for other in before(number):
                given = came[other] if index.is_of_one_call(number, other) else passed[other]
                if given is not None:
                    value = given if value is None else join(value, given)
            came[number] = value
            names = index.named(number)
            for name in reversed(names) if back else names:
                if value is not None:
                    found[name] = join(found[name], value) if name in found else value
                value = pass_on(name, value)
            passed[number] = value
        return found

    def cut_between(self, source: str, target: str = LOSS) -> tuple[Cut, ...]:
        """Return where gradients end on the ways from `source` to `target`.

        Empty where one way lets gradients through, and where no way leads there at all.
        """
        index = self._indexed
        start, goal = index.given_out(source), index.inside(target)
        by_gradient = index.forward(start, "gradient")
        if by_gradient & goal:
            return ()
        on_the_way = index.forward(start, "value") & index.backward(goal)
        cuts: dict[Cut, None] = {}
        for vertex in sorted(on_the_way - by_gradient):
            made = index.graph.vertices[vertex]
            for position, operand in enumerate(made.operands):
                if operand in by_gradient and not made.passes_gradient(position):
                    cuts[index.cut(vertex, operand, by_gradient)] = None
        return tuple(cuts)

    def endings(self, names: Collection[str]) -> dict[str, Ending]:
        """Return for each of `names`, to which no gradient comes, where its way ends, and by what.

        Its way goes on until gradients come in again, behind a cut, or nothing takes what was
        made. What ran nowhere is left out.

        Args:
            names: names of layers that hold no other, and of parameters.
        """
        return dict(endings(self._indexed, frozenset(names)))

    def cut_recurrences(self) -> tuple[Recurrence, ...]:
        """Return the layers that get values of what they gave before, each time without gradients.

        They are called three times or more, and no gradient goes from one call to the next, nor
        beside it. Of layers that lie in each other, the outermost.
        """
        return tuple(cut_recurrences(self._indexed))

    def branch(self, layer: str) -> frozenset[str]:
        """Return `layer` and the layers whose values get to an end of the run through it alone."""
        index = self._indexed
        inside, operands = index.inside(layer), index.next_to("value", back=True)
        free = walk(index.all_ends - inside, lambda n: [o for o in operands(n) if o not in inside])
        others = {index.homes[vertex] for vertex in free}
        feeding = {index.homes[vertex] for vertex in index.backward(inside)}
        return frozenset(name for name in feeding - others if name is not None) | {layer}

    def own_operations(self, layer: str) -> tuple[Operation, ...]:
        """Return the operations of the first call of `layer` that are its own code's, in order.

        Those of layers inside are theirs; what only lays values out anew is left out.
        """
        return tuple(self._indexed.own_operations(layer))

    def is_added(self, name: str) -> bool:
        """Whether what a layer or source gives goes, scaled at most, into a sum with more."""
        index, vertices = self._indexed, self.graph.vertices

        def onward(number: int) -> list[int]:
            takers = index.takers[number]
            return [t for t in takers if vertices[t].has("view", "product")]

        way = walk(index.values.get(name, ()), onward)
        sums = {t for v in way for t in index.takers[v] if vertices[t].has("sum")}
        others = {o for t in sums for o in vertices[t].operands} - {*way}
        return not all(index.is_fixed[other] for other in others)

    def inside(self, layer: str) -> frozenset[int]:
        """Return the numbers of the vertices that calls of `layer` made, or layers inside it."""
        return frozenset(self._indexed.inside(layer))

    def after(self, *vertices: int) -> frozenset[int]:
        """Return the numbers of the vertices that values of these get to, and of these."""
        return frozenset(self._indexed.forward(set(vertices), "value"))

    def origins(self, *vertices: int, others: Collection[int] = ()) -> frozenset[int]:
        """Return the layers and sources that these are made of, as numbers of vertices.

        Nothing but operations lies between, and what is a layer's or a source is its own origin.

        Args:
            vertices: their numbers.
            others: operations to take for origins, too.
        """
        return frozenset(self._indexed.origins(vertices, others))

    def is_alike(self, one: int, other: int) -> bool:
        """Whether two vertices were made by the same operations and layers of the same values.

        In another layout at most, with a gradient or without; numbers that operations take beside
        their operands are not known, nor is what is drawn at random.
        """
        first = self._indexed.first_alike
        return first[one] == first[other]

    def gate(self, layer: str) -> tuple[Gate, ...]:
        """Return the multiplications that values of `layer` go through before the next layer."""
        index = self._indexed
        gates: dict[Gate, None] = {}
        met: set[int] = set()
        todo = [(taker, v) for v in index.given_out(layer) for taker in index.takers[v]]
        while todo:
            vertex, before = todo.pop()
            made = index.graph.vertices[vertex]
            if vertex in met or index.homes[vertex] is not None:
                continue
            met.add(vertex)
            if made.has("product"):
                others = (operand for operand in made.operands if operand != before)
                gates.update((index.gate(layer, other, made.line), None) for other in others)
            elif made.has("view"):
                todo.extend((taker, vertex) for taker in index.takers[vertex])
        return tuple(gates)

    def last_of(self, *layers: str, by: By = "value") -> tuple[str, ...]:
        """Return those of `layers` that feed no other of them; of a loop, the last to run."""
        index = self._indexed
        onward = index.next_to(by, back=True)
        goal = set[int]().union(*map(index.inside, layers))
        before = walk((operand for vertex in goal for operand in onward(vertex)), onward)
        return tuple(n for n in layers if max(index.values.get(n, ()), default=-1) not in before)

    def siblings(self, layer: str) -> tuple[str, ...]:
        """Return the other layers of the same class that the same layer calls."""
        index = self._indexed
        calls = index.graph.calls
        kinds = {(calls[n].type_name, calls[n].parent) for n in index.calls_of(layer)}
        same = dict.fromkeys(name for kind in sorted(kinds) for name in index.of_one_kind[kind])
        return tuple(name for name in same if name != layer)

    def __str__(self) -> str:
        index = self._indexed
        lines = [f"partial: {note}" for note in self.notes]
        lines += [f"{layer} <- {index.expression_into(layer)}" for layer in self.layers]
        if index.graph.loss is not None:
            lines.append(f"{LOSS} <- {index.expression(index.graph.loss, ())}")
        return "\n".join(lines)


def _rebuilt(graph: Graph) -> Flow:
    return Flow(lambda: graph)
