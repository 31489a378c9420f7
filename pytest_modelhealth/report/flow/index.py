"""What every question about a flow looks up: names, the graph, the walks along it, and words."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import cached_property
from typing import TypeVar

from pytest_modelhealth.errors import InspectionError, LayerNotFoundError, suggest
from pytest_modelhealth.report.flow.graph import (
    LOSS,
    OUTPUT,
    SOURCES,
    UNSEEN,
    Call,
    Cut,
    Graph,
    Kind,
    Vertex,
)

K = TypeVar("K")


class Index:
    """A graph with what every question looks up: all of it linear in the vertices.

    Args:
        make: makes the graph, when it is first asked for.
    """

    def __init__(self, make: Callable[[], Graph]) -> None:
        self._make = make
        self._ways: dict[str, tuple[list[list[int]], list[list[int]]]] = {}

    @cached_property
    def graph(self) -> Graph:
        """The record itself."""
        graph = self._make()
        self._make = lambda: graph  # what made it need not be held any longer
        return graph

    @cached_property
    def _vertices(self) -> tuple[Vertex, ...]:
        return self.graph.vertices

    @cached_property
    def operation_vertices(self) -> dict[int, Vertex]:
        """Operations, constants, and all else of which a fact was read, by their number."""
        kinds = Kind.OPERATION, Kind.CONSTANT
        return {n: v for n, v in enumerate(self._vertices) if v.kind in kinds or v.facts}

    # Names.

    @cached_property
    def homes(self) -> list[str | None]:
        """The layer or source that each vertex is of; ``None`` for an operation between layers."""
        layers = [c.layer if c.last == at else None for at, c in enumerate(self.graph.calls)]
        return [
            (layers[v.call] if v.call >= 0 else None) if v.kind is Kind.OPERATION else v.name
            for v in self._vertices
        ]

    @cached_property
    def _made_in(self) -> dict[int, list[int]]:
        """The vertices that each call made, those of calls inside it apart."""
        made = ((v.call, n) for n, v in enumerate(self._vertices) if v.kind not in SOURCES)
        return _grouped(made)

    @cached_property
    def _given_to(self) -> dict[int, list[int]]:
        return _grouped((o, n) for n, call in enumerate(self.graph.calls) for o in call.inputs)

    @cached_property
    def _returned_by(self) -> dict[int, list[int]]:
        return _grouped((o, n) for n, call in enumerate(self.graph.calls) for o in call.outputs)

    @cached_property
    def _by_layer(self) -> dict[str, list[int]]:
        return _grouped((call.layer, number) for number, call in enumerate(self.graph.calls))

    @cached_property
    def values(self) -> dict[str, list[int]]:
        """The vertices that each layer returned, and those that each source is."""
        sources = ((v.name, n) for n, v in enumerate(self._vertices) if v.kind in SOURCES)
        returned = {
            layer: [output for number in numbers for output in self.graph.calls[number].outputs]
            for layer, numbers in self._by_layer.items()
        }
        return _grouped(sources) | returned

    def calls_of(self, layer: str) -> list[int]:
        """Return the numbers of the calls of a layer; none for an end or a source.

        Raises:
            LayerNotFoundError: nothing of this name ran.
        """
        if layer not in self._by_layer:
            self.inside(layer)
        return self._by_layer.get(layer, [])

    def inside(self, layer: str) -> frozenset[int]:
        """Return the numbers of the vertices that calls of `layer` made, or layers inside it."""
        if layer in self._by_layer:
            return frozenset().union(*map(self.inside_call, self._by_layer[layer]))
        if found := self._ends.get(layer) or self.values.get(layer):
            return frozenset(found)
        raise LayerNotFoundError(
            f"nothing called {layer!r} ran in this flow"
            f"{suggest(str(layer), [*self.values, OUTPUT, LOSS])} "
            "It has the layers that were called, the batch, parameters and buffers by name."
        )

    def inside_call(self, number: int) -> set[int]:
        """Return the vertices made within a call."""
        calls = range(number, self.graph.calls[number].last + 1)
        return {vertex for call in calls for vertex in self._made_in.get(call, ())}

    def given_out(self, *layers: str) -> set[int]:
        """Return what is inside and what the calls returned: a layer may return its own input."""
        return set().union(*map(self.inside, layers), *(self.values.get(n, ()) for n in layers))

    @cached_property
    def _ends(self) -> dict[str, set[int]]:
        loss = self.graph.loss
        return {OUTPUT: set(self.graph.outputs), LOSS: set() if loss is None else {loss}}

    def is_end(self, name: str) -> bool:
        """Whether a name is that of an end of the run."""
        return name in (LOSS, OUTPUT) and name not in self.values

    def ends(self, vertices: set[int]) -> list[str]:
        """Return the ends of the run that are among `vertices`."""
        return [name for name, numbers in self._ends.items() if not numbers.isdisjoint(vertices)]

    def names_of(self, vertices: Iterable[int]) -> set[str]:
        """Return what vertices are of, and the layers that return one of them."""
        vertices, calls = list(vertices), self.graph.calls
        names = {home for number in vertices if (home := self.homes[number]) is not None}
        return names | {calls[c].layer for v in vertices for c in self._returned_by.get(v, ())}

    # Walks.

    def ways(self, by: str = "value", *, back: bool = False) -> list[list[int]]:
        """Return for each vertex those that take it, or `back` those that it takes.

        Args:
            by: which ways count, a row of `_WAYS`.
            back: from the ends to the sources.
        """
        if by not in _WAYS:
            raise InspectionError(f'by must be "value" or "gradient", not {by!r}')
        if by not in self._ways:
            there: list[list[int]] = [[] for _ in self._vertices]
            taken = [_WAYS[by](self, *each) for each in enumerate(self._vertices)]
            back_ = [[*dict.fromkeys(operands)] for operands in taken]
            for number, operands in enumerate(back_):
                for operand in operands:
                    there[operand].append(number)
            self._ways[by] = there, back_
        return self._ways[by][back]

    def walk(
        self,
        start: Iterable[int],
        by: str = "value",
        *,
        back: bool = False,
        through: Collection[int] | None = None,
    ) -> set[int]:
        """Return `start` and the vertices that come of it, or `back` those that it comes of.

        Args:
            start: numbers of vertices.
            by: by which ways.
            back: from the ends to the sources.
            through: the vertices to go on from; without them from all.
        """
        ways, met, todo = self.ways(by, back=back), set[int](), list(start)
        if by == "gradient" and not back:  # of what has none nothing comes
            todo = [number for number in todo if self._vertices[number].live]
        while todo:
            number = todo.pop()
            if number not in met:
                met.add(number)
                if through is None or number in through:
                    todo += ways[number]
        return met

    def cut_ways(
        self, start: Iterable[int], goal: Collection[int], through: Collection[int] | None = None
    ) -> list[Cut] | None:
        """Return where gradients end on all ways from vertices to others, if none lets them by."""
        live = self.walk(start, "gradient", through=through)
        if not live.isdisjoint(goal):
            return None
        way = self.walk(start, through=through) & self.walk(goal, back=True, through=through)
        return [
            self.cut(number, operand, live)
            for number in sorted(way - live)
            for position, operand in enumerate(self._vertices[number].operands)
            if operand in live and not self._vertices[number].passes_gradient(position)
        ]

    def origins(self, *vertices: int, others: Collection[int] = ()) -> frozenset[int]:
        """Return the layers and sources that these are made of, as numbers of vertices.

        Nothing but operations lies between, and what is a layer's or a source is its own origin.

        Args:
            vertices: their numbers.
            others: operations to take for origins, too.
        """
        through = set(range(len(self.homes))).difference(others) if others else None
        met = self.walk(vertices, "to operations", back=True, through=through)
        return frozenset(n for n in met if self.homes[n] is not None or n in others)

    def as_it_is(self, number: int, *traits: str) -> list[int]:
        """Return the vertices whose values one holds, itself first: as they are, or by traits."""
        held, traits = [number], traits or ("view",)
        while self._vertices[number].has(*traits) and self._vertices[number].operands:
            number = self._vertices[number].operands[0]  # others say where, or how
            held.append(number)
        return held

    # Facts of vertices, each of those before it.

    @cached_property
    def is_fixed(self) -> list[bool]:
        """For each vertex whether its values depend on no batch, no parameter and no chance."""
        fixed: list[bool] = []
        for vertex in self._vertices:
            operands = [fixed[operand] for operand in vertex.operands]
            taken = [self._vertices[operand] for operand in vertex.operands]
            is_made = vertex.kind is Kind.CONSTANT and vertex.has("constant")
            zeros = [v.kind is Kind.CONSTANT and v.has("zeros") for v in taken]
            is_nothing = vertex.has("product") and any(zeros)
            is_made_of_such = vertex.kind is Kind.OPERATION and bool(operands) and all(operands)
            fixed.append(is_made or is_nothing or is_made_of_such or vertex.kind is Kind.BUFFER)
        return fixed

    @cached_property
    def first_alike(self) -> list[int]:
        """For each vertex the first that holds the same: made alike of the same, or laid out anew.

        Numbers that an operation takes beside its operands are not known.
        """
        known: dict[tuple[str, tuple[int, ...]], int] = {}
        first: list[int] = []
        for number, vertex in enumerate(self._vertices):
            operands = tuple(first[operand] for operand in vertex.operands)
            if len(operands) == 1 and vertex.has("whole"):
                first.append(operands[0])
                continue
            maker = vertex.name
            if vertex.kind is Kind.CALL:  # calls of a function are numbered: it is one
                call = self.graph.calls[vertex.call]
                own = call.layer.rpartition(".")[2]
                is_function = own.rpartition("_")[0] == call.type_name
                maker = call.type_name if is_function else call.layer
            first.append(known.setdefault((maker, operands), number) if operands else number)
        return first

    # Words.

    @cached_property
    def named(self) -> list[list[str]]:
        """The layer or source that each vertex is of, and those that hold it and return it."""
        named = [[] if home is None else [home] for home in self.homes]
        for number, returning in self._returned_by.items():
            for call in reversed(returning):
                last, made_in = self.graph.calls[call].last, self._vertices[number].call
                if call != last and call <= made_in <= last:
                    named[number].append(self.graph.calls[call].layer)
        return named

    def cut(self, number: int, operand: int, among: set[int]) -> Cut:
        """Return the cut that a vertex makes between an operand of it and what comes after.

        Args:
            number: the vertex.
            operand: what it takes.
            among: where the gradients would go to, which `operand` was made of.
        """
        vertex = self._vertices[number]
        before = self._maker(operand, self.around(vertex.call), among) or vertex.name
        if vertex.kind is Kind.UNKNOWN:
            lines = (self._vertices[taker].line for taker in sorted(self.walk([number])))
            return Cut(UNSEEN, before, self._next_home(number), next(filter(None, lines), ""))
        after = self.homes[number]
        if after is None or after == before:  # it may lie at the end of a layer's own forward
            after = self._next_home(number)
        return Cut(vertex.name, before, after, vertex.line)

    def _maker(self, number: int, around: Collection[int], among: set[int]) -> str | None:
        """Return the outermost layer, or else the source, that a vertex comes from by `among`."""
        while True:
            name = self.container(number, around) or self.homes[number]
            operands = [o for o in self._vertices[number].operands if o in among]
            if name is not None or not operands:
                return name
            number = max(operands, key=lambda o: (self._vertices[o].kind not in SOURCES, o))

    def _next_home(self, number: int) -> str:
        """Return the layer or end that takes what comes of a vertex, by the fewest operations."""
        met = [number]
        for vertex in met:  # which grows
            for taker in self.ways()[vertex]:
                home = self.homes[taker]
                if home is not None and self._vertices[taker].kind is not Kind.UNKNOWN:
                    return home
                if taker not in met:
                    met.append(taker)
        return [*reversed(self.ends(set(met))), OUTPUT][0]

    def around(self, call: int) -> list[int]:
        """Return a call and those that had not returned when it was made."""
        calls = []
        while call >= 0:
            calls.append(call)
            call = self.graph.calls[call].parent
        return calls

    def container(
        self, number: int, around: Collection[int], choose: Callable[[list[int]], int] = min
    ) -> str | None:
        """Return the outermost layer, of those that have returned, that returned a vertex.

        Args:
            number: the vertex.
            around: the calls that have not returned.
            choose: `max` for the innermost.
        """
        calls = [call for call in self._returned_by.get(number, ()) if call not in around]
        return self.graph.calls[choose(calls)].layer if calls else None

    def cuts(self, vertex: Vertex) -> bool:
        """Whether a vertex takes what has a gradient and has none."""
        return not vertex.live and any(self._vertices[o].live for o in vertex.operands)

    def operand(self, number: int, call: Call, around: Collection[int]) -> str:
        """Name what an operation of a call takes, through what lays values out anew."""
        while number not in call.inputs:
            home = self.container(number, around) or self.homes[number]
            vertex = self._vertices[number]
            if home is not None and home != call.layer:
                return home
            if not vertex.has("view") or not vertex.operands or self.cuts(vertex):
                return f"`{vertex.function}`"
            number = vertex.operands[0]
        return "input"


def _grouped(pairs: Iterable[tuple[K, int]]) -> dict[K, list[int]]:
    """Return the second of each pair by the first."""
    found: dict[K, list[int]] = {}
    for key, number in pairs:
        found.setdefault(key, []).append(number)
    return found


def _shifted(index: Index, _: int, vertex: Vertex) -> Iterable[int]:
    """Return what a vertex gives on as it is, or adds what is fixed to."""
    if not vertex.has("whole", "sum"):
        return ()
    varied = {operand for operand in vertex.operands if not index.is_fixed[operand]}
    is_whole = vertex.has("whole")
    return [o for o in vertex.operands if is_whole or varied <= {o}]


_WAYS: dict[str, Callable[[Index, int, Vertex], Iterable[int]]] = {
    "value": lambda _, n, v: v.operands,
    "gradient": lambda _, n, v: [o for at, o in enumerate(v.operands) if v.passes_gradient(at)],
    # a walk that stops at the next layers goes on from operations alone, there or back
    "from operations": lambda index, n, v: [o for o in v.operands if index.homes[o] is None],
    "to operations": lambda index, n, v: v.operands if index.homes[n] is None else (),
    "whole": lambda _, n, v: v.operands if v.has("whole") else (),
    "shifted": _shifted,
    "viewed": lambda index, n, v: v.operands if v.has("view") and index.homes[n] is None else (),
    "scaled": lambda _, n, v: v.operands if v.has("view", "product") else (),
}
"""Which operands of a vertex are ways, by what goes along them."""
