"""A graph with what every question looks up; the sweeps that questions are made of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from functools import cached_property
from typing import TypeVar

from pytest_modelhealth.errors import LayerNotFoundError, suggest
from pytest_modelhealth.report.flow.graph import (
    AS_IT_IS,
    LOSS,
    OUTPUT,
    PRODUCTS,
    SOURCES,
    SUMS,
    WHOLE,
    By,
    Call,
    Cut,
    Ending,
    Gate,
    Graph,
    Kind,
    Operation,
    Step,
    Vertex,
)

T = TypeVar("T")
_Edge = tuple[int, int]  # what takes a vertex, and the vertex


class Index:
    """A graph with what every question looks up: all of it linear in the vertices."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.takers: list[list[int]] = [[] for _ in graph.vertices]
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

    def given_out(self, name: str, inside: set[int]) -> set[int]:
        """Return `inside` and what the calls returned: a layer may return its own input."""
        calls = self._by_layer.get(name, ())
        return inside.union(*(self.graph.calls[number].outputs for number in calls))

    def values_of(self, name: str) -> tuple[int, ...]:
        """Return the vertices that a layer returned, or that a source is; none of what is not."""
        calls = self._by_layer.get(name)
        if calls is None:
            return tuple(self._by_source.get(name, ()))
        return tuple(v for number in calls for v in self.graph.calls[number].outputs)

    def origin(self, name: str) -> tuple[Kind, str]:
        """Return a layer or a source with its kind."""
        sources = () if name in self._by_layer else self._by_source.get(name, ())
        return next((self.graph.vertices[v].kind for v in sources), Kind.CALL), name

    @property
    def names(self) -> Iterator[str]:
        """The layers that ran and the sources that were read."""
        yield from self._by_layer
        yield from (name for name in self._by_source if name not in self._by_layer)

    def last(self, names: tuple[str, ...], by: By) -> Iterator[str]:
        """Yield those of some layers and sources that feed no other of them."""
        vertices = self.graph.vertices
        goal = {v for name in names for v in self.inside(name)}
        given = {
            operand
            for v in goal
            for position, operand in enumerate(vertices[v].operands)
            if by == "value" or vertices[v].passes_gradient(position)
        }
        before = self.backward(given, by)
        for name in names:
            if max(self.values_of(name), default=-1) not in before:
                yield name

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
        return name in self._by_layer or name in self._by_source

    def next_homes(self, layer: str) -> set[str]:
        """Return the layers and ends that take values of a layer with no layer in between."""
        inside = self.inside(layer)
        given_out = self.given_out(layer, inside)
        found = set(self.ends(given_out))
        met = set(inside)
        todo = [taker for v in given_out for taker in self.takers[v] if taker > v]
        while todo:
            vertex = todo.pop()
            if vertex in met:
                continue
            met.add(vertex)
            home = self.homes[vertex]
            if home is not None:
                found.add(home)
            else:
                found.update(self.ends({vertex}))
                todo.extend(self.takers[vertex])
        return found

    def given_as_it_is(self, layer: str) -> Iterator[str]:
        """Yield the layers and sources of which a layer is called with all values."""
        for number in self.calls_of(layer):
            around = set(self._around(number))
            for given in self.graph.calls[number].inputs:
                for vertex in sorted(self.as_it_is(given, WHOLE), reverse=True):
                    maker = self.homes[vertex] or self._innermost(vertex, around)
                    if maker is not None and maker != layer:
                        yield maker
                        break

    def takers_as_it_is(self, layer: str) -> Iterator[str]:
        """Yield the layers and ends that are given all values of a layer, in order."""
        calls = [self.graph.calls[number] for number in self.calls_of(layer)]
        todo = [v for call in calls for v in call.outputs] or sorted(self.inside(layer))
        holding: set[int] = set()
        while todo:
            number = todo.pop()
            if number not in holding:
                holding.add(number)
                takers = self.takers[number]
                todo.extend(t for t in takers if self.graph.vertices[t].function in WHOLE)
        since = min(self.calls_of(layer), default=-1)
        taking = {n for v in holding for n in self._given_to.get(v, ()) if n > since}
        for number in sorted(taking):
            call = self.graph.calls[number]
            if call.layer != layer and call.last == number:
                yield call.layer
        yield from self.ends(holding)

    def _innermost(self, vertex: int, around: set[int]) -> str | None:
        """Return the innermost layer, of those that have returned, that returned a vertex."""
        calls = [call for call in self._returned_by.get(vertex, ()) if call not in around]
        return self.graph.calls[max(calls)].layer if calls else None

    def names_after(self, layers: tuple[str, ...], by: By) -> frozenset[str]:
        """Return the layers and ends that values of one of `layers` get to."""
        names: set[str] = set()
        inside = set[int]().union(*map(self.inside, layers))
        start = inside.union(*(self.given_out(layer, set()) for layer in layers))
        reached = self.forward(start, by)
        beyond = reached - start
        since = min((n for layer in layers for n in self._by_layer.get(layer, ())), default=0)
        for call in self.graph.calls:
            if not beyond.isdisjoint(call.outputs):
                names.add(call.layer)
            elif call.last >= since and not reached.isdisjoint(call.outputs):
                names.add(call.layer)  # it holds one of them, or passes on what that returned
        names.update(home for v in beyond - inside if (home := self.homes[v]) is not None)
        return frozenset((names - set(layers)) | set(self.ends(reached)))

    def names_before(self, layers: tuple[str, ...], by: By) -> frozenset[str]:
        """Return the layers and sources whose values get to one of `layers`."""
        goal = set[int]().union(*map(self.inside, layers))
        own = set[int]().union(*(self.inside(name) for name in layers if not self._is_end(name)))
        return self._names(self.backward(goal, by) - own) - set(layers)

    @cached_property
    def used(self) -> frozenset[str]:
        """The layers and sources whose values get to an end of the run."""
        return self._names(self.backward(self.all_ends))

    def _names(self, vertices: set[int]) -> frozenset[str]:
        """Return what vertices are of, and the layers that return one of them."""
        names = {home for vertex in vertices if (home := self.homes[vertex]) is not None}
        returned = (call for vertex in vertices for call in self._returned_by.get(vertex, ()))
        return frozenset(names.union(self.graph.calls[number].layer for number in returned))

    def _is_end(self, name: str) -> bool:
        return name in (LOSS, OUTPUT) and not self.knows(name)

    def endings(self, names: Collection[str]) -> Iterator[tuple[str, Ending]]:
        """Yield each of `names` that ran, with where the way of its values ends for gradients."""
        vertices, used = self.graph.vertices, self.backward(self.all_ends)
        last: list[str | None] = [None] * len(vertices)  # of `names`, on the way from a vertex
        cut: list[_Edge | None] = [None] * len(vertices)  # what takes a live vertex and cuts
        cut_by: dict[_Edge, set[int]] = {}
        latest: dict[str, int] = {}
        for number in range(len(vertices) - 1, -1, -1):
            for taker in self.takers[number]:
                if taker not in used and number in used:
                    continue
                passes = self._passes(number, taker)
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
        for name, number in latest.items():
            end = last[number] or name
            edge = cut[latest[end]]
            yield name, Ending(end, cuts[edge] if edge else None)

    def _passes(self, number: int, taker: int) -> bool:
        """Whether a gradient goes back from what takes a vertex."""
        vertex = self.graph.vertices[taker]
        places = (place for place, o in enumerate(vertex.operands) if o == number)
        return self.graph.vertices[number].live and any(map(vertex.passes_gradient, places))

    def ends(self, vertices: set[int]) -> Iterator[str]:
        """Yield the ends of the run that are among `vertices`."""
        if not self._outputs.isdisjoint(vertices):
            yield OUTPUT
        if self.graph.loss in vertices:
            yield LOSS

    def forward(self, start: set[int], by: By, last: int | None = None) -> set[int]:
        """Return what comes of `start` up to the vertex `last`, itself included."""
        vertices = self.graph.vertices
        reached = set(start) if by == "value" else {v for v in start if vertices[v].live}
        end = len(vertices) if last is None else last + 1
        for number in range(min(reached, default=end), end):
            vertex = vertices[number]
            if number not in reached and any(
                operand in reached and (by == "value" or vertex.passes_gradient(position))
                for position, operand in enumerate(vertex.operands)
            ):
                reached.add(number)
        return reached

    def backward(self, goal: set[int], by: By = "value", first: int = 0) -> set[int]:
        """Return what comes to `goal` from the vertex `first` on, itself included."""
        reached = set(goal)
        for number in range(max(reached, default=-1), first - 1, -1):
            if number in reached:
                vertex = self.graph.vertices[number]
                reached.update(
                    operand
                    for position, operand in enumerate(vertex.operands)
                    if by == "value" or vertex.passes_gradient(position)
                )
        return reached

    def sweep(
        self,
        pass_on: Callable[[str, T | None], T | None],
        join: Callable[[T, T], T],
        back: bool,
        by: By,
    ) -> dict[str, T]:
        """Return what comes to each layer and source of what those before it pass on."""
        count = len(self.graph.vertices)
        came: list[T | None] = [None] * count
        passed: list[T | None] = [None] * count
        found: dict[str, T] = {}
        for number in range(count - 1, -1, -1) if back else range(count):
            value = None
            for other in self._next(number, back, by):
                given = came[other] if self._is_of_one_call(number, other) else passed[other]
                if given is not None:
                    value = given if value is None else join(value, given)
            came[number] = value
            names = self._named(number)
            for name in reversed(names) if back else names:
                if value is not None:
                    found[name] = join(found[name], value) if name in found else value
                value = pass_on(name, value)
            passed[number] = value
        return found

    def _named(self, number: int) -> list[str]:
        """Return the layer or source that a vertex is of, and those that hold it and return it."""
        home, made_in = self.homes[number], self.graph.vertices[number].call
        names = [] if home is None else [home]
        for call in reversed(self._returned_by.get(number, ())):
            last = self.graph.calls[call].last
            if call != last and call <= made_in <= last:
                names.append(self.graph.calls[call].layer)
        return names

    def _next(self, number: int, back: bool, by: By) -> Iterator[int]:
        """Yield the vertices that one takes values of, or those that take its own."""
        vertices = self.graph.vertices
        for maker, taker in (
            ((number, taker) for taker in self.takers[number])
            if back
            else ((maker, number) for maker in vertices[number].operands)
        ):
            if by == "value" or any(
                operand == maker and vertices[taker].passes_gradient(position)
                for position, operand in enumerate(vertices[taker].operands)
            ):
                yield taker if back else maker

    def _is_of_one_call(self, a: int, b: int) -> bool:
        one, other = self.graph.vertices[a], self.graph.vertices[b]
        return (
            self.homes[a] is not None and self.homes[a] == self.homes[b] and one.call == other.call
        )

    def steps(self, layer: str, inside: set[int]) -> Iterator[Step]:
        """Yield the ways into `inside`, each operation being met once with and once without."""
        met: set[tuple[int, bool]] = set()
        todo: list[tuple[int, tuple[str, ...], bool, str]] = []
        for number in sorted(inside, reverse=True):
            vertex = self.graph.vertices[number]
            if vertex.kind in SOURCES or (self._is_end(layer) and self.homes[number]):
                todo.append((number, (), True, vertex.line))
                continue
            own = (vertex.name,) if self.homes[number] is None else ()
            for position, operand in enumerate(vertex.operands):
                if operand not in inside:
                    todo.append((operand, own, vertex.passes_gradient(position), vertex.line))
        while todo:
            number, operations, is_open, line = todo.pop()
            if (number, is_open) in met:
                continue
            met.add((number, is_open))
            vertex = self.graph.vertices[number]
            home = self.homes[number]
            if home is not None:
                if home != layer:
                    yield Step(home, layer, operations, is_open and vertex.live, line)
                continue
            for position in range(len(vertex.operands) - 1, -1, -1):
                passes = is_open and vertex.passes_gradient(position)
                name = vertex.name if len(operations) < _LONGEST else "..."
                way = (name, *operations[-_LONGEST:])
                todo.append((vertex.operands[position], way, passes, line or vertex.line))

    def between(self, start: set[int], goal: set[int]) -> set[int]:
        """Return the operations on the ways from `start` to `goal` that pass through no layer."""
        after: set[int] = set()
        todo = [taker for vertex in start for taker in self.takers[vertex]]
        while todo:
            vertex = todo.pop()
            if vertex not in after and vertex not in start and self.homes[vertex] is None:
                after.add(vertex)
                todo.extend(self.takers[vertex])
        found: set[int] = set()
        todo = [*goal, *(o for vertex in goal for o in self.graph.vertices[vertex].operands)]
        while todo:
            vertex = todo.pop()
            if vertex in after and vertex not in found:
                found.add(vertex)
                todo.extend(self.graph.vertices[vertex].operands)
        return found

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

    def _container(self, number: int, around: set[int]) -> str | None:
        """Return the outermost layer, of those that have returned, that returned a vertex."""
        calls = [call for call in self._returned_by.get(number, ()) if call not in around]
        return self.graph.calls[min(calls)].layer if calls else None

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
                if home is not None:
                    return home
                todo.append(taker)
        return next(reversed(list(self.ends(met))), OUTPUT)

    def adds_its_input(self, call: Call) -> bool:
        """Whether a call returns a sum of its own input and something else."""
        given = set(call.inputs)
        met = set(given)
        todo = list(call.outputs)
        while todo:
            number = todo.pop()
            if number in met:
                continue
            met.add(number)
            vertex = self.graph.vertices[number]
            if vertex.function in SUMS and vertex.kind is Kind.OPERATION:
                ways = [bool(self.as_it_is(operand) & given) for operand in vertex.operands]
                if any(ways) and not all(ways):
                    return True
            if vertex.kind is Kind.CALL or vertex.function in AS_IT_IS | SUMS:
                todo.extend(vertex.operands)  # a norm may end the block, and sums may follow sums
        return False

    def is_added_to_its_input(self, call: Call) -> bool:
        """Whether a call's caller adds what it returns to something that its input is made of.

        The way to the sum is followed while nothing else takes what is on it.
        """
        way = {*call.outputs}
        todo = [*way]
        while todo and len(way) < _BRANCH:
            takers = self.takers[todo.pop()]
            if len(takers) != 1:
                continue
            (taker,) = takers
            vertex = self.graph.vertices[taker]
            others = set(vertex.operands) - way
            if vertex.function in SUMS and others:
                by_caller = vertex.call == call.parent
                return by_caller and any(self._leads(other, call) for other in others)
            if vertex.function in AS_IT_IS | PRODUCTS or not others:
                way.add(taker)
                todo.append(taker)
        return False

    def _leads(self, number: int, call: Call) -> bool:
        """Whether a call is given values of a vertex, by way of what its caller computes."""
        vertices = self.graph.vertices
        if vertices[number].kind in _OWN:
            return False
        last = self.graph.calls[call.parent].last if call.parent >= 0 else len(self.graph.calls)
        reached = {number}
        for later in range(number + 1, max(call.inputs, default=-1) + 1):
            is_inside = call.parent <= vertices[later].call <= last
            if is_inside and not reached.isdisjoint(vertices[later].operands):
                reached.add(later)
        return not reached.isdisjoint(call.inputs)

    def origins(self, vertices: tuple[int, ...], others: Collection[int] = ()) -> set[int]:
        """Return the vertices of layers and sources, or `others`, that these are made of."""
        met: set[int] = set()
        todo = list(vertices)
        while todo:
            number = todo.pop()
            if number not in met:
                met.add(number)
                if self.homes[number] is None and number not in others:
                    todo.extend(self.graph.vertices[number].operands)
        return {number for number in met if self.homes[number] is not None or number in others}

    @cached_property
    def first_alike(self) -> list[int]:
        """For each vertex the first that holds the same: made alike of the same, or laid out anew.

        Numbers that an operation takes beside its operands are not known.
        """
        known: dict[tuple[str, tuple[int, ...]], int] = {}
        first: list[int] = []
        for number, vertex in enumerate(self.graph.vertices):
            operands = tuple(first[operand] for operand in vertex.operands)
            if len(operands) == 1 and vertex.kind is Kind.OPERATION and vertex.function in WHOLE:
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

    def as_it_is(self, number: int, operations: frozenset[str] = AS_IT_IS) -> set[int]:
        """Return the vertices whose values a vertex holds as they are, itself included."""
        met: set[int] = set()
        todo = [number]
        while todo:
            number = todo.pop()
            if number not in met:
                met.add(number)
                vertex = self.graph.vertices[number]
                if vertex.function in operations and vertex.kind is Kind.OPERATION:
                    todo.extend(vertex.operands[:1])  # others say where, or how
        return met

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
                if vertex.kind is Kind.OPERATION and (cuts or vertex.function not in AS_IT_IS):
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
            if vertex.function not in AS_IT_IS or not vertex.operands or self._cuts(vertex):
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
        if vertex.live and vertex.function in AS_IT_IS and len(parts) == 1:
            return parts[0]
        if vertex.function in SUMS and not vertex.function.endswith("sub"):
            return " + ".join(parts)
        if vertex.function in PRODUCTS and len(parts) > 1:
            return " * ".join(f"({p})" if " + " in p else p for p in parts)
        return f"{vertex.name}({', '.join(parts)})"


_DEEPEST = 6
_OWN = frozenset({Kind.PARAMETER, Kind.BUFFER, Kind.CONSTANT})
_BRANCH = 24
"""Vertices after a layer among which the sum of its branch with what went past it is looked for."""
_LONGEST = 24
"""Operations that a step names, those next to its target: a residual stream has one a block."""
