"""`Flow`: who feeds whom in one run, as recorded; how to ask it, in a few words.

A vertex is a call of a layer, an operation between layers, or a source: the batch, a parameter, a
buffer, a constant. Every question is a sweep over the vertices, so its cost is linear in them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from pytest_modelhealth.errors import InspectionError, LayerNotFoundError, suggest

By = Literal["value", "gradient"]

LOSS, OUTPUT = "loss", "output"
"""What the ends of a run are called in questions, unless a layer has that name."""


class Kind(StrEnum):
    """What a vertex is."""

    CALL = "call"
    OPERATION = "operation"
    INPUT = "input"
    TARGET = "target"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    CONSTANT = "constant"
    UNKNOWN = "unknown"


SOURCES = frozenset(Kind) - {Kind.CALL, Kind.OPERATION}
"""What a run starts from; unknown is where values came from that nothing showed."""


@dataclass(frozen=True, slots=True)
class Vertex:
    """One call of a layer, one operation, or one source.

    Args:
        kind: which of these it is.
        name: name of the layer, the operation (``"add"``, ``"detach"``), the parameter or buffer,
            the place in the batch (``"input 0"``), or the function that made a constant.
        operands: the vertices it was computed from, which all come before it.
        cuts: positions in `operands` by which values come and no gradient goes back.
        call: the innermost call that made it, an index into `Flow.calls`; -1 outside the model.
        live: whether a gradient can come to it.
        line: ``path:line`` of the user's code, ``""`` where it is not known.
    """

    kind: Kind
    name: str
    operands: tuple[int, ...] = ()
    cuts: frozenset[int] = frozenset()
    call: int = -1
    live: bool = False
    line: str = ""

    @property
    def function(self) -> str:
        """The operation without the number of the output that was taken: ``split[2]``."""
        return self.name.partition("[")[0]

    def passes_gradient(self, position: int) -> bool:
        """Whether a gradient can go back to the operand at a position."""
        return self.live and position not in self.cuts


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a layer; calls are numbered in the order in which they began.

    Args:
        layer: its name.
        type_name: its class, or the function's name.
        parent: the call that made it; -1 for that of the model.
        last: the last call inside it, itself if there is none.
        inputs: the vertices of the tensors it was called with.
        outputs: the vertices of the tensors it returned.
        line: ``path:line`` of the user's code that made the call.
    """

    layer: str
    type_name: str
    parent: int
    last: int
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    line: str = ""


@dataclass(frozen=True, slots=True)
class Graph:
    """What was recorded of one run.

    Args:
        vertices: in an order in which operands come first.
        calls: in the order in which they began.
        outputs: the vertices of what the model returned.
        loss: the vertex of the loss; ``None`` where there was none.
        notes: where the graph is not exact, and why; empty where it is.
    """

    vertices: tuple[Vertex, ...] = ()
    calls: tuple[Call, ...] = ()
    outputs: tuple[int, ...] = ()
    loss: int | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """A way from one layer or source to another with no third layer on it.

    Args:
        source, target: names.
        operations: the operations on the way, in order.
        differentiable: whether a gradient goes back along it.
        line: ``path:line`` of the last operation on it that has one, else of the target's call.
    """

    source: str
    target: str
    operations: tuple[str, ...] = ()
    differentiable: bool = True
    line: str = ""

    def __str__(self) -> str:
        return " -> ".join((self.source, *self.operations, self.target))


@dataclass(frozen=True)
class Cut:
    """An operation by which values pass and gradients do not.

    Args:
        operation: its name (``"detach"``), or that of the layer that cut.
        source: the layer or source before it.
        target: the layer after it, ``"output"`` or ``"loss"``.
        line: ``path:line`` of the user's code, where it is known.
    """

    operation: str
    source: str
    target: str
    line: str = ""

    def __str__(self) -> str:
        where = f" at {self.line}" if self.line else ""
        return f"`{self.operation}`{where}, between {self.source} and {self.target}"


@dataclass(frozen=True)
class Gate:
    """A multiplication that a layer's values go through.

    Args:
        layer: the layer whose values are multiplied.
        kind: what by: a parameter, a buffer, a constant, or a call of another layer.
        by: its name.
        line: ``path:line`` of the multiplication, where it is known.
    """

    layer: str
    kind: Kind
    by: str
    line: str = ""


AS_IT_IS = frozenset(
    {"alias", "as_strided", "clone", "contiguous", "expand", "expand_as", "flatten", "float"}
    | {"getitem", "half", "permute", "reshape", "reshape_alias", "select", "slice", "split"}
    | {"split_with_sizes", "chunk", "squeeze", "t", "to", "to_copy", "transpose", "unbind"}
    | {"unflatten", "unsafe_split", "unsafe_view", "unsqueeze", "view", "view_as", "movedim"}
    | {"swapaxes", "detach", "data", "bfloat16", "double", "narrow", "unsafe_chunk", "mt"}
)
"""Operations that leave values what they are, all of them or a part."""

SUMS = frozenset({"add", "iadd", "sub", "rsub", "subtract", "radd", "isub", "addcmul"})
PRODUCTS = frozenset({"mul", "imul", "multiply", "rmul"})


class Flow:
    """Who feeds whom in one run.

    Layers are asked for by name; so are sources (``"input 0"``, names of parameters and buffers)
    and the two ends, ``"output"`` and ``"loss"``. A layer that holds others stands for all inside.
    ``str(flow)`` is a line a layer.

    Args:
        make: makes the graph, when it is first asked for.
    """

    def __init__(self, make: Callable[[], Graph]) -> None:
        self._make = make
        self._index: _Index | None = None

    @property
    def graph(self) -> Graph:
        """The record itself."""
        return self._indexed.graph

    @property
    def _indexed(self) -> _Index:
        if self._index is None:
            graph = self._make()
            self._make = lambda: graph  # what made it need not be held any longer
            self._index = _Index(graph)
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
        calls = self.graph.calls
        names = (call.layer for number, call in enumerate(calls) if call.last == number)
        return tuple(dict.fromkeys(names))

    def __reduce__(self) -> tuple[Callable[[Graph], Flow], tuple[Graph]]:
        return _rebuilt, (self.graph,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Flow) and self.graph == other.graph

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        graph = self.graph
        exact = "exact" if self.is_exact else "partial"
        return f"<flow of {len(graph.calls):,} calls, {len(graph.vertices):,} vertices, {exact}>"

    def producers(self, layer: str) -> tuple[str, ...]:
        """Return the layers and sources whose values come to `layer` with no layer in between.

        Raises:
            LayerNotFoundError: nothing of this name ran; the message names the nearest.
        """
        return tuple(dict.fromkeys(step.source for step in self.steps_into(layer)))

    def consumers(self, layer: str) -> tuple[str, ...]:
        """Return the layers and ends that take values of `layer` with no layer in between.

        Raises:
            LayerNotFoundError: nothing of this name ran; the message names the nearest.
        """
        index = self._indexed
        inside = index.inside(layer)
        given_out = index.given_out(layer, inside)
        found = set(index.ends(given_out))
        met = set(inside)
        todo = [t for v in given_out for t in index.takers[v] if t > v]
        while todo:
            vertex = todo.pop()
            if vertex in met:
                continue
            met.add(vertex)
            home = index.homes[vertex]
            if home is not None:
                found.add(home)
            else:
                found.update(index.ends({vertex}))
                todo.extend(index.takers[vertex])
        order = {name: place for place, name in enumerate((*self.layers, OUTPUT, LOSS))}
        return tuple(sorted(found - {layer}, key=lambda name: order.get(name, -1)))

    def line(self, layer: str) -> str:
        """Return ``path:line`` of the user's code that first called `layer`; ``""`` if unknown.

        Raises:
            LayerNotFoundError: nothing of this name ran; the message names the nearest.
        """
        numbers = self._indexed.calls_of(layer)
        return self.graph.calls[numbers[0]].line if numbers else ""

    def steps_into(self, layer: str) -> tuple[Step, ...]:
        """Return the ways into `layer` from what feeds it, with the operations on them.

        Raises:
            LayerNotFoundError: nothing of this name ran; the message names the nearest.
        """
        index = self._indexed
        inside = index.inside(layer)
        return tuple(dict.fromkeys(index.steps(layer, inside)))

    def reach(self, layer: str, by: By = "value") -> frozenset[str]:
        """Return the layers and ends that values of `layer` get to, or from which gradients come.

        Args:
            layer: name of a layer or source.
            by: ``"value"``, or ``"gradient"`` for the ways alone along which gradients go back.

        Raises:
            LayerNotFoundError: nothing of this name ran; the message names the nearest.
            InspectionError: `by` is neither of the two.
        """
        if by not in ("value", "gradient"):
            raise InspectionError(f'by must be "value" or "gradient", not {by!r}')
        index = self._indexed
        inside = index.inside(layer)
        reached = index.forward(index.given_out(layer, inside), by)
        names = {home for v in reached - inside if (home := index.homes[v]) is not None}
        return frozenset(names | set(index.ends(reached)))

    def cut_between(self, source: str, target: str = LOSS) -> tuple[Cut, ...]:
        """Return where gradients end on the ways from `source` to `target`.

        Empty where one way lets gradients through, and where no way leads there at all.

        Raises:
            LayerNotFoundError: nothing of this name ran; the message names the nearest.
        """
        index = self._indexed
        start, goal = index.inside(source), index.inside(target)
        start = index.given_out(source, start)
        by_gradient = index.forward(start, "gradient")
        if by_gradient & goal:
            return ()
        on_the_way = index.forward(start, "value") & index.backward(goal)
        cuts: dict[Cut, None] = {}
        for vertex in sorted(on_the_way - by_gradient):
            made = index.graph.vertices[vertex]
            for position, operand in enumerate(made.operands):
                if operand in by_gradient and not made.passes_gradient(position):
                    cuts[index.cut(vertex, operand)] = None
        return tuple(cuts)

    def branch(self, layer: str) -> frozenset[str]:
        """Return `layer` and the layers whose values get to an end of the run through it alone.

        Raises:
            LayerNotFoundError: nothing of this name ran; the message names the nearest.
        """
        index = self._indexed
        graph, inside = index.graph, index.inside(layer)
        free = {*graph.outputs, *(() if graph.loss is None else (graph.loss,))} - inside
        for vertex in range(len(graph.vertices) - 1, -1, -1):
            if vertex in free:
                free.update(o for o in graph.vertices[vertex].operands if o not in inside)
        others = {index.homes[vertex] for vertex in free}
        feeding = {index.homes[vertex] for vertex in index.backward(inside)}
        return frozenset(name for name in feeding - others if name is not None) | {layer}

    def residual(self, layer: str) -> bool:
        """Whether each call of `layer` adds its own input to what the layers inside make of it.

        Raises:
            LayerNotFoundError: nothing of this name ran; the message names the nearest.
        """
        index = self._indexed
        calls = [index.graph.calls[number] for number in index.calls_of(layer)]
        return bool(calls) and all(map(index.adds_its_input, calls))

    def gate(self, layer: str) -> tuple[Gate, ...]:
        """Return the multiplications that the values of `layer` go through before the next layer.

        Raises:
            LayerNotFoundError: nothing of this name ran; the message names the nearest.
        """
        index = self._indexed
        given_out = index.given_out(layer, index.inside(layer))
        gates: dict[Gate, None] = {}
        met: set[int] = set()
        todo = [(taker, vertex) for vertex in given_out for taker in index.takers[vertex]]
        while todo:
            vertex, before = todo.pop()
            made = index.graph.vertices[vertex]
            if vertex in met or index.homes[vertex] is not None:
                continue
            met.add(vertex)
            if made.function in PRODUCTS:
                others = (operand for operand in made.operands if operand != before)
                gates.update((index.gate(layer, other, made.line), None) for other in others)
            elif made.function in AS_IT_IS:
                todo.extend((taker, vertex) for taker in index.takers[vertex])
        return tuple(gates)

    def siblings(self, layer: str) -> tuple[str, ...]:
        """Return the other layers of the same class that the same layer calls.

        Raises:
            LayerNotFoundError: nothing of this name ran; the message names the nearest.
        """
        index = self._indexed
        calls = index.graph.calls
        kinds = {(calls[n].type_name, calls[n].parent) for n in index.calls_of(layer)}
        same = (call.layer for call in calls if (call.type_name, call.parent) in kinds)
        return tuple(name for name in dict.fromkeys(same) if name != layer)

    def __str__(self) -> str:
        index = self._indexed
        lines = [f"partial: {note}" for note in self.notes]
        lines += [f"{layer} <- {index.expression_into(layer)}" for layer in self.layers]
        if index.graph.loss is not None:
            lines.append(f"{LOSS} <- {index.expression(index.graph.loss, ())}")
        return "\n".join(lines)


class _Index:
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
        self._outputs = frozenset(graph.outputs)
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
        self.inside(layer)
        return self._by_layer.get(layer, [])

    def inside(self, name: str) -> set[int]:
        """Return the vertices that a name stands for.

        Raises:
            LayerNotFoundError: nothing of this name ran.
        """
        numbers = self._by_layer.get(name)
        if numbers is not None:
            return {
                vertex
                for number in numbers
                for call in range(number, self.graph.calls[number].last + 1)
                for vertex in self._by_call[call]
            }
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

    def given_out(self, name: str, inside: set[int]) -> set[int]:
        """Return `inside` and what the calls returned: a layer may return its own input."""
        calls = self._by_layer.get(name, ())
        return inside.union(*(self.graph.calls[number].outputs for number in calls))

    def ends(self, vertices: set[int]) -> Iterator[str]:
        """Yield the ends of the run that are among `vertices`."""
        if not self._outputs.isdisjoint(vertices):
            yield OUTPUT
        if self.graph.loss in vertices:
            yield LOSS

    def forward(self, start: set[int], by: By) -> set[int]:
        """Return what comes of `start`, itself included."""
        vertices = self.graph.vertices
        reached = set(start) if by == "value" else {v for v in start if vertices[v].live}
        for number in range(min(reached, default=0), len(vertices) if reached else 0):
            vertex = vertices[number]
            if number not in reached and any(
                operand in reached and (by == "value" or vertex.passes_gradient(position))
                for position, operand in enumerate(vertex.operands)
            ):
                reached.add(number)
        return reached

    def backward(self, goal: set[int]) -> set[int]:
        """Return what comes to `goal`, itself included."""
        reached = set(goal)
        for number in range(max(reached, default=-1), -1, -1):
            if number in reached:
                reached.update(self.graph.vertices[number].operands)
        return reached

    def steps(self, layer: str, inside: set[int]) -> Iterator[Step]:
        """Yield the ways into `inside`, each operation being met once with and once without."""
        met: set[tuple[int, bool]] = set()
        todo: list[tuple[int, tuple[str, ...], bool, str]] = []
        for number in sorted(inside, reverse=True):
            vertex = self.graph.vertices[number]
            if vertex.kind in SOURCES or (number == self.graph.loss and self.homes[number]):
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

    def cut(self, number: int, operand: int) -> Cut:
        """Return the cut that a vertex makes between an operand of it and what comes after."""
        vertex = self.graph.vertices[number]
        around = set(self._around(vertex.call))
        before = self._container(operand, around) or self.homes[self._latest_home(operand)]
        after = self.homes[number] or self._next_home(number)
        return Cut(vertex.name, before or vertex.name, after, vertex.line)

    def _around(self, call: int) -> Iterator[int]:
        while call >= 0:
            yield call
            call = self.graph.calls[call].parent

    def _container(self, number: int, around: set[int]) -> str | None:
        """Return the outermost layer, of those that have returned, that returned a vertex."""
        calls = [call for call in self._returned_by.get(number, ()) if call not in around]
        return self.graph.calls[min(calls)].layer if calls else None

    def _latest_home(self, number: int) -> int:
        """Return the last vertex of a layer or source among those that `number` was made of."""
        while self.homes[number] is None and self.graph.vertices[number].operands:
            number = max(self.graph.vertices[number].operands)
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

    def as_it_is(self, number: int) -> set[int]:
        """Return the vertices whose values a vertex holds as they are, itself included."""
        met: set[int] = set()
        todo = [number]
        while todo:
            number = todo.pop()
            if number not in met:
                met.add(number)
                vertex = self.graph.vertices[number]
                if vertex.function in AS_IT_IS and vertex.kind is Kind.OPERATION:
                    todo.extend(vertex.operands)
        return met

    def gate(self, layer: str, number: int, line: str) -> Gate:
        """Return that the values of a layer are multiplied by those of a vertex."""
        origins = [self.graph.vertices[v] for v in sorted(self.as_it_is(number))]
        origin = next((m for m in origins if m.kind is not Kind.OPERATION), origins[0])
        return Gate(layer, origin.kind, self.homes[self._latest_home(number)] or origin.name, line)

    def expression_into(self, layer: str) -> str:
        """Return what a layer is called with, as an expression: ``blocks.0 + blocks.1.out``."""
        number = self._by_layer[layer][0]
        call = self.graph.calls[number]
        around = tuple(self._around(number))
        shown = [self.expression(operand, around) for operand in dict.fromkeys(call.inputs)]
        if call.last == number:  # what a layer's own code reads beside its inputs
            own = [v for v in self._by_call[number] if self.graph.vertices[v].kind is not Kind.CALL]
            read = {o for v in own for o in self.graph.vertices[v].operands} - set(own)
            outside = sorted(read - set(call.inputs) - self._source_vertices())
            shown += [self.expression(operand, around) for operand in outside]
        return ", ".join(dict.fromkeys(shown)) or "nothing"

    def _source_vertices(self) -> set[int]:
        return {vertex for vertices in self._by_source.values() for vertex in vertices}

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
_LONGEST = 24
"""Operations that a step names, those next to its target: a residual stream has one a block."""


def _rebuilt(graph: Graph) -> Flow:
    return Flow(lambda: graph)
