"""A graph with what every question looks up, and the walks that questions are made of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice

from pytest_modelhealth.errors import InspectionError, LayerNotFoundError, suggest
from pytest_modelhealth.operations import having
from pytest_modelhealth.report.flow.graph import (
    LOSS,
    OUTPUT,
    SOURCES,
    UNSEEN,
    By,
    Call,
    Cut,
    Gate,
    Graph,
    Kind,
    Operation,
    Vertex,
)


def walk(start: Iterable[int], onward: Callable[[int], Iterable[int]]) -> set[int]:
    """Return `start` and all that one gets to from there by steps of `onward`."""
    met: set[int] = set()
    todo = list(start)
    while todo:
        number = todo.pop()
        if number not in met:
            met.add(number)
            todo.extend(onward(number))
    return met


class Index:
    """A graph with what every question looks up: all of it linear in the vertices."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.takers: list[list[int]] = [[] for _ in graph.vertices]
        self._operands = [vertex.operands for vertex in graph.vertices]
        self.homes: list[str | None] = []
        """The layer or source that each vertex is of; ``None`` for an operation between layers."""
        self._by_call: list[list[int]] = [[] for _ in graph.calls]
        self._by_layer: dict[str, list[int]] = {}
        self._by_source: dict[str, list[int]] = {}
        self._returned_by: dict[int, list[int]] = {}
        self._given_to: dict[int, list[int]] = {}
        self._outputs = frozenset(graph.outputs)
        self.all_ends = {*graph.outputs, *(() if graph.loss is None else (graph.loss,))}
        for number, vertex in enumerate(graph.vertices):
            for operand in set(vertex.operands):
                self.takers[operand].append(number)
            self.homes.append(self._home(vertex))
            if vertex.kind in SOURCES:
                self._by_source.setdefault(vertex.name, []).append(number)
            elif vertex.call >= 0:
                self._by_call[vertex.call].append(number)
        for number, call in enumerate(graph.calls):
            self._by_layer.setdefault(call.layer, []).append(number)
            for output in call.outputs:
                self._returned_by.setdefault(output, []).append(number)
            for given in call.inputs:
                self._given_to.setdefault(given, []).append(number)

    def _home(self, vertex: Vertex) -> str | None:
        if vertex.kind is not Kind.OPERATION:
            return vertex.name
        if vertex.call < 0:
            return None
        call = self.graph.calls[vertex.call]
        return call.layer if call.last == vertex.call else None

    def calls_of(self, layer: str) -> list[int]:
        """Return the numbers of the calls of a layer.

        Raises:
            LayerNotFoundError: it never ran.
        """
        if layer not in self._by_layer:
            self.inside(layer)  # an end or a source has none
        return self._by_layer.get(layer, [])

    def inside(self, name: str) -> set[int]:
        """Return the vertices that a name stands for.

        Raises:
            LayerNotFoundError: nothing of this name ran.
        """
        numbers = self._by_layer.get(name)
        if numbers is not None:
            return set[int]().union(*map(self.inside_call, numbers))
        if name == LOSS and self.graph.loss is not None:
            return {self.graph.loss}
        if name == OUTPUT and self.graph.outputs:
            return set(self.graph.outputs)
        if name in self._by_source:
            return set(self._by_source[name])
        raise LayerNotFoundError(
            f"nothing called {name!r} ran in this flow"
            f"{suggest(str(name), [*self._by_layer, *self._by_source, OUTPUT, LOSS])} "
            "It has the layers that were called, the batch, parameters and buffers by name."
        )

    def inside_call(self, number: int) -> set[int]:
        """Return the vertices made within a call."""
        calls = range(number, self.graph.calls[number].last + 1)
        return {vertex for call in calls for vertex in self._by_call[call]}

    def given_out(self, name: str) -> set[int]:
        """Return what is inside and what the calls returned: a layer may return its own input."""
        calls = self._by_layer.get(name, ())
        return self.inside(name).union(*(self.graph.calls[number].outputs for number in calls))

    @cached_property
    def values(self) -> dict[str, list[int]]:
        """The vertices that each layer returned, and those that each source is."""
        found: dict[str, list[int]] = {name: [] for name in self._by_layer}
        for call in self.graph.calls:
            found[call.layer] += call.outputs
        return self._by_source | found

    @cached_property
    def of_one_kind(self) -> dict[tuple[str, int], list[str]]:
        """The layers by their class and the call that calls them, in order."""
        found: dict[tuple[str, int], list[str]] = {}
        for call in self.graph.calls:
            found.setdefault((call.type_name, call.parent), []).append(call.layer)
        return found

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The layers that hold no other that ran, in order of their first call."""
        calls = enumerate(self.graph.calls)
        return tuple(dict.fromkeys(call.layer for number, call in calls if call.last == number))

    @cached_property
    def order(self) -> dict[str, int]:
        """The place of each of these layers, and of the ends behind them."""
        return {name: place for place, name in enumerate((*self.layers, OUTPUT, LOSS))}

    def knows(self, name: str) -> bool:
        """Whether something of this name ran or was read."""
        return name in self.values

    def following(self, start: set[int], but: set[int]) -> set[int]:
        """Return what takes values of `start`, up to and with the next layers; none of `but`."""

        def onward(number: int) -> Sequence[int]:
            is_end = number in but or self.homes[number] is not None
            return () if is_end else self.takers[number]

        return walk((t for vertex in start for t in self.takers[vertex]), onward) - but

    def given_as_it_is(self, layer: str) -> Iterator[str]:
        """Yield the layers and sources of which a layer is called with all values."""
        for number in self.calls_of(layer):
            around = set(self._around(number))
            for given in self.graph.calls[number].inputs:
                held = sorted(self.as_it_is(given, having("whole")), reverse=True)
                makers = (self.homes[v] or self._container(v, around, max) for v in held)
                yield from islice((name for name in makers if name not in (None, layer)), 1)

    def takers_as_it_is(self, layer: str, *, shifted: bool = False) -> Iterator[str]:
        """Yield the layers and ends that are given all values of a layer, in order.

        Args:
            layer: its name.
            shifted: also those that are given its sum with what is fixed.
        """
        calls = [self.graph.calls[number] for number in self.calls_of(layer)]
        vertices = self.graph.vertices

        def onward(number: int) -> Iterator[int]:
            for taker in self.takers[number]:
                others = (self.is_fixed[o] for o in vertices[taker].operands if o != number)
                is_shift = shifted and vertices[taker].has("sum") and all(others)
                if is_shift or vertices[taker].has("whole"):
                    yield taker

        holding = walk({v for call in calls for v in call.outputs} or self.inside(layer), onward)
        since = min(self.calls_of(layer), default=-1)
        taking = {n for v in holding for n in self._given_to.get(v, ()) if n > since}
        for number in sorted(taking):
            call = self.graph.calls[number]
            if call.layer != layer and call.last == number:
                yield call.layer
        yield from self.ends(holding)

    def names_of(self, vertices: set[int]) -> frozenset[str]:
        """Return what vertices are of, and the layers that return one of them."""
        names = {home for vertex in vertices if (home := self.homes[vertex]) is not None}
        returned = (call for vertex in vertices for call in self._returned_by.get(vertex, ()))
        return frozenset(names.union(self.graph.calls[number].layer for number in returned))

    def is_end(self, name: str) -> bool:
        """Whether a name is that of an end of the run."""
        return name in (LOSS, OUTPUT) and not self.knows(name)

    def ends(self, vertices: set[int]) -> Iterator[str]:
        """Yield the ends of the run that are among `vertices`."""
        if not self._outputs.isdisjoint(vertices):
            yield OUTPUT
        if self.graph.loss in vertices:
            yield LOSS

    @cached_property
    def _by_gradient(self) -> tuple[list[list[int]], list[list[int]]]:
        """For each vertex the takers that gradients come from, and the operands they go to."""
        takers: list[list[int]] = [[] for _ in self.graph.vertices]
        operands: list[list[int]] = []
        for number, vertex in enumerate(self.graph.vertices):
            passing = (o for at, o in enumerate(vertex.operands) if vertex.passes_gradient(at))
            operands.append(list(dict.fromkeys(passing)))
            for operand in operands[-1]:
                takers[operand].append(number)
        return takers, operands

    def next_to(self, by: By, *, back: bool) -> Callable[[int], Sequence[int]]:
        """Return what gives the vertices that take one, or `back` those it takes."""
        if by == "value":
            return self._operands.__getitem__ if back else self.takers.__getitem__
        if by == "gradient":
            return self._by_gradient[back].__getitem__
        raise InspectionError(f'by must be "value" or "gradient", not {by!r}')

    def forward(self, start: Iterable[int], by: By, last: int | None = None) -> set[int]:
        """Return what comes of `start` up to the vertex `last`, itself included."""
        onward, vertices = self.next_to(by, back=False), self.graph.vertices
        begin = start if by == "value" else (v for v in start if vertices[v].live)
        if last is None:
            return walk(begin, onward)
        return walk(begin, lambda number: [taker for taker in onward(number) if taker <= last])

    def backward(self, goal: Iterable[int], by: By = "value", first: int = 0) -> set[int]:
        """Return what comes to `goal` from the vertex `first` on, itself included."""
        onward = self.next_to(by, back=True)
        if not first:
            return walk(goal, onward)
        return walk(goal, lambda number: onward(number) if number >= first else ())

    def named(self, number: int) -> list[str]:
        """Return the layer or source that a vertex is of, and those that hold it and return it."""
        home, made_in = self.homes[number], self.graph.vertices[number].call
        names = [] if home is None else [home]
        for call in reversed(self._returned_by.get(number, ())):
            last = self.graph.calls[call].last
            if call != last and call <= made_in <= last:
                names.append(self.graph.calls[call].layer)
        return names

    def is_of_one_call(self, a: int, b: int) -> bool:
        """Whether two vertices were made by one call of a layer."""
        one, other = self.graph.vertices[a], self.graph.vertices[b]
        return (
            self.homes[a] is not None and self.homes[a] == self.homes[b] and one.call == other.call
        )

    def cut(self, number: int, operand: int, among: set[int]) -> Cut:
        """Return the cut that a vertex makes between an operand of it and what comes after.

        Args:
            number: the vertex.
            operand: what it takes.
            among: where the gradients would go to, which `operand` was made of.
        """
        vertex = self.graph.vertices[number]
        around = set(self._around(vertex.call))
        before = self._maker(operand, around, among) or vertex.name
        if vertex.kind is Kind.UNKNOWN:
            vertices, takers = self.graph.vertices, sorted(self.forward({number}, "value"))
            line = next((vertices[taker].line for taker in takers if vertices[taker].line), "")
            return Cut(UNSEEN, before, self._next_home(number), line)
        after = self.homes[number]
        if after is None or after == before:  # it may lie at the end of a layer's own forward
            after = self._next_home(number)
        return Cut(vertex.name, before, after, vertex.line)

    def _maker(self, number: int, around: set[int], among: set[int]) -> str | None:
        """Return the outermost layer, or else the source, that a vertex comes from by `among`."""
        while True:
            name = self._container(number, around) or self.homes[number]
            operands = [o for o in self.graph.vertices[number].operands if o in among]
            if name is not None or not operands:
                return name
            number = max(operands, key=lambda o: (self.graph.vertices[o].kind not in SOURCES, o))

    def _around(self, call: int) -> Iterator[int]:
        while call >= 0:
            yield call
            call = self.graph.calls[call].parent

    def _container(
        self, number: int, around: set[int], choose: Callable[[list[int]], int] = min
    ) -> str | None:
        """Return the outermost layer, of those that have returned, that returned a vertex.

        Args:
            number: the vertex.
            around: the calls that have not returned.
            choose: `max` for the innermost.
        """
        calls = [call for call in self._returned_by.get(number, ()) if call not in around]
        return self.graph.calls[choose(calls)].layer if calls else None

    def latest_home(self, number: int) -> int:
        """Return the last vertex of a layer or source among those that `number` was made of."""
        while self.homes[number] is None and self.graph.vertices[number].operands:
            operands = self.graph.vertices[number].operands
            number = max(operands, key=lambda o: (self.graph.vertices[o].live, o))
        return number

    def _next_home(self, number: int) -> str:
        met: set[int] = set()
        todo = [number]
        while todo:
            vertex = todo.pop(0)
            if vertex in met:
                continue
            met.add(vertex)
            for taker in self.takers[vertex]:
                home = self.homes[taker]
                if home is not None and self.graph.vertices[taker].kind is not Kind.UNKNOWN:
                    return home
                todo.append(taker)
        return next(reversed(list(self.ends(met))), OUTPUT)

    @cached_property
    def is_fixed(self) -> list[bool]:
        """For each vertex whether its values depend on no batch, no parameter and no chance."""
        fixed: list[bool] = []
        for vertex in self.graph.vertices:
            operands = [fixed[operand] for operand in vertex.operands]
            if vertex.kind is Kind.OPERATION and vertex.has("product"):
                zeros = (self.graph.vertices[operand] for operand in vertex.operands)
                nothing = any(v.kind is Kind.CONSTANT and v.name in having("zeros") for v in zeros)
                fixed.append(nothing or all(operands))
            elif vertex.kind is Kind.OPERATION:
                fixed.append(bool(operands) and all(operands))
            else:
                is_made = vertex.kind is Kind.CONSTANT and vertex.name in having("constant")
                fixed.append(is_made or vertex.kind is Kind.BUFFER)
        return fixed

    def origins(self, vertices: Iterable[int], others: Collection[int] = ()) -> set[int]:
        """Return the vertices of layers and sources, or `others`, that these are made of."""

        def is_origin(number: int) -> bool:
            return self.homes[number] is not None or number in others

        operands = self.next_to("value", back=True)
        met = walk(vertices, lambda number: () if is_origin(number) else operands(number))
        return set(filter(is_origin, met))

    @cached_property
    def first_alike(self) -> list[int]:
        """For each vertex the first that holds the same: made alike of the same, or laid out anew.

        Numbers that an operation takes beside its operands are not known.
        """
        known: dict[tuple[str, tuple[int, ...]], int] = {}
        first: list[int] = []
        for number, vertex in enumerate(self.graph.vertices):
            operands = tuple(first[operand] for operand in vertex.operands)
            if len(operands) == 1 and vertex.kind is Kind.OPERATION and vertex.has("whole"):
                first.append(operands[0])
            elif operands:
                first.append(known.setdefault((self._made_by(vertex), operands), number))
            else:
                first.append(number)
        return first

    def _made_by(self, vertex: Vertex) -> str:
        """Return the operation, or the layer; of calls of a function, which are numbered, that."""
        if vertex.kind is not Kind.CALL:
            return vertex.name
        call = self.graph.calls[vertex.call]
        own = call.layer.rpartition(".")[2]
        return call.type_name if own.rpartition("_")[0] == call.type_name else call.layer

    def as_it_is(self, number: int, operations: frozenset[str] = having("view")) -> set[int]:
        """Return the vertices whose values a vertex holds as they are, itself included."""

        def onward(number: int) -> Sequence[int]:
            vertex = self.graph.vertices[number]
            is_view = vertex.function in operations and vertex.kind is Kind.OPERATION
            return vertex.operands[:1] if is_view else ()  # others say where, or how

        return walk([number], onward)

    def own_operations(self, layer: str) -> Iterator[Operation]:
        """Yield the operations of a layer's first call that are its own code's."""
        for number in self.calls_of(layer)[:1]:
            call = self.graph.calls[number]
            around = set(self._around(number))
            own = self._by_call[number]
            returned = self.backward(set(call.outputs), first=own[0]) if own else set()
            for made in own:
                vertex = self.graph.vertices[made]
                cuts = self._cuts(vertex)
                if vertex.kind is Kind.OPERATION and (cuts or not vertex.has("view")):
                    operands = [self._operand(o, call, around) for o in vertex.operands]
                    name, line = vertex.function, vertex.line
                    yield Operation(name, tuple(operands), line, cuts, made in returned)

    def _operand(self, number: int, call: Call, around: set[int]) -> str:
        """Name what an operation of a call takes, through what lays values out anew."""
        while number not in call.inputs:
            home = self._container(number, around) or self.homes[number]
            vertex = self.graph.vertices[number]
            if home is not None and home != call.layer:
                return home
            if not vertex.has("view") or not vertex.operands or self._cuts(vertex):
                return f"`{vertex.function}`"
            number = vertex.operands[0]
        return "input"

    def _cuts(self, vertex: Vertex) -> bool:
        """Whether a vertex takes what has a gradient and has none."""
        return not vertex.live and any(self.graph.vertices[o].live for o in vertex.operands)

    def gate(self, layer: str, number: int, line: str) -> Gate:
        """Return that the values of a layer are multiplied by those of a vertex."""
        origins = [self.graph.vertices[v] for v in sorted(self.as_it_is(number))]
        origin = next((m for m in origins if m.kind is not Kind.OPERATION), origins[0])
        return Gate(layer, origin.kind, self.homes[self.latest_home(number)] or origin.name, line)

    def expression_into(self, layer: str) -> str:
        """Return what a layer is called with, as an expression: ``blocks.0 + blocks.1.out``."""
        number = self._by_layer[layer][0]
        call = self.graph.calls[number]
        around = tuple(self._around(number))
        shown = [self.expression(operand, around) for operand in dict.fromkeys(call.inputs)]
        if call.last == number:  # what a layer's own code reads beside its inputs
            vertices = self.graph.vertices
            own = [v for v in self._by_call[number] if vertices[v].kind is not Kind.CALL]
            read = {o for v in own for o in vertices[v].operands}.difference(own, call.inputs)
            outside = sorted(o for o in read if vertices[o].kind not in SOURCES)
            shown += [self.expression(operand, around) for operand in outside]
        return ", ".join(dict.fromkeys(shown)) or "nothing"

    def expression(self, number: int, around: tuple[int, ...], depth: int = 0) -> str:
        """Return what a vertex is made of, down to layers, sources and what layers returned.

        Args:
            number: the vertex.
            around: the calls that had not returned then; what others returned has their name.
            depth: how deep it stands in an expression; what is deeper than a few levels is left
                out.
        """
        home = self._container(number, set(around)) or self.homes[number]
        vertex = self.graph.vertices[number]
        if home is not None:
            return home
        if depth > _DEEPEST:
            return "..."
        parts = [self.expression(o, around, depth + 1) for o in dict.fromkeys(vertex.operands)]
        if vertex.live and vertex.has("view") and len(parts) == 1:
            return parts[0]
        if vertex.has("sum") and not vertex.has("difference"):
            return " + ".join(parts)
        if vertex.has("product") and len(parts) > 1:
            return " * ".join(f"({p})" if " + " in p else p for p in parts)
        return f"{vertex.name}({', '.join(parts)})"


_DEEPEST = 6
