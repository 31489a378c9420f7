"""Where gradients end on a way: at a factor of zero, or at what the caller says."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import islice

from pytest_modelhealth.report.flow.graph import (
    AS_IT_IS,
    MATRIX_PRODUCTS,
    PRODUCTS,
    SCALED,
    SUMS,
    WHOLE,
    ZEROS,
    Edge,
    Ending,
    Factor,
    Kind,
    Stopped,
    Vertex,
)
from pytest_modelhealth.report.flow.index import Index

_ALL = WHOLE | {"expand", "expand_as"}
_PARTS = AS_IT_IS - _ALL
_KEEP_ZERO = AS_IT_IS | frozenset(
    {"abs", "div", "flip", "gelu", "mean", "native_dropout", "neg", "relu", "repeat", "roll"}
    | {"silu", "sin", "sum", "tanh"}
)
_MULTIPLY = PRODUCTS | MATRIX_PRODUCTS | SCALED
_FROM_THE_BATCH = frozenset({Kind.INPUT, Kind.TARGET})
_MOST = 8

Origin = tuple[Kind, str]


class Values:
    """What is known of the values of each vertex: all zero and because of what, or not.

    Args:
        index: the graph.
        zeros: names of the layers and sources whose values are all zero.
        parts: names of those of which a part may be.
    """

    def __init__(self, index: Index, zeros: Collection[str], parts: Collection[str]) -> None:
        self._index = index
        self.zeros: dict[int, tuple[Origin, ...]] = {}
        """The vertices of zeros, with what they come of."""
        self._known: set[int] = set()  # those that are not all zero
        self._partly: dict[int, Origin] = {}
        whole = {v: index.origin(name) for name in zeros for v in index.values.get(name, ())}
        partly = {v: index.origin(name) for name in parts for v in index.values.get(name, ())}
        for number, vertex in enumerate(index.graph.vertices):
            if number in partly:
                self._partly[number] = partly[number]
            if number in whole:
                self._set(number, vertex, whole[number])
            elif vertex.kind is Kind.CONSTANT and vertex.name in ZEROS:
                self.zeros[number] = ((vertex.kind, vertex.name),)
            elif vertex.kind is Kind.OPERATION:
                self._follow(number, vertex)
            elif vertex.kind not in _FROM_THE_BATCH:
                self._known.add(number)

    def _set(self, number: int, vertex: Vertex, own: Origin | None = None) -> None:
        before = (origin for o in vertex.operands for origin in self.zeros.get(o, ()))
        origins = dict.fromkeys((own, *before) if own is not None else before)
        self.zeros[number] = tuple(islice(origins, _MOST))

    def _follow(self, number: int, vertex: Vertex) -> None:
        function, operands = vertex.function, vertex.operands
        are_zero = [operand in self.zeros for operand in operands]
        if any(are_zero) and (
            (function in PRODUCTS | MATRIX_PRODUCTS and not function.startswith("add"))
            or (function in _KEEP_ZERO and are_zero[0])
            or (function in SUMS and all(are_zero) and len(operands) > 1)
            or (function in SCALED and all(are_zero[1:3]) and len(operands) > 1)
        ):
            self._set(number, vertex)
        elif operands and function in _PARTS and operands[0] in self._partly:
            self.zeros[number] = (self._partly[operands[0]],)
        elif operands and function in _ALL:
            if operands[0] in self._partly:
                self._partly[number] = self._partly[operands[0]]
            if operands[0] in self._known:
                self._known.add(number)

    def factors(self, number: int) -> Iterable[Factor]:
        """Yield what keeps, or may keep, gradients from the operands of a product."""
        vertex = self._index.graph.vertices[number]
        first = 1 if vertex.function.startswith(("add", "baddb", "lerp")) else 0
        end = 2 if vertex.function in SCALED else len(vertex.operands)
        places = range(first, min(end, len(vertex.operands)))
        for position in places:
            others = [vertex.operands[p] for p in places if p != position]
            nothing = [o for other in others for o in self.zeros.get(other, ())]
            if nothing:
                origins = tuple(islice(dict.fromkeys(nothing), _MOST))
                yield Factor((number, position), origins, is_zero=True)
                continue
            for other in others:
                if other not in self._known:
                    home = self._index.latest_home(other)
                    origin = (self._index.graph.vertices[home].kind, self._index.homes[home] or "")
                    yield Factor((number, position), (origin,), is_zero=False)


def factors(index: Index, zeros: Collection[str], parts: Collection[str]) -> tuple[Factor, ...]:
    """Return where a factor of zero, or one that is not known, keeps gradients back."""
    values = Values(index, zeros, parts)
    vertices = enumerate(index.graph.vertices)
    products = (n for n, v in vertices if v.function in _MULTIPLY)
    return tuple(factor for number in products for factor in values.factors(number))


def endings(index: Index, names: Collection[str]) -> Iterator[tuple[str, Ending]]:
    """Yield each of `names` that ran, with where the way of its values ends for gradients."""
    vertices, used = index.graph.vertices, index.backward(index.all_ends)
    learning = index.next_to("gradient", back=False)
    last: list[str | None] = [None] * len(vertices)  # of `names`, on the way from a vertex
    cut: list[tuple[int, int] | None] = [None] * len(vertices)  # what cuts, and what it takes
    cut_by: dict[tuple[int, int], set[int]] = {}
    latest: dict[str, int] = {}
    for number in range(len(vertices) - 1, -1, -1):
        for taker in index.takers[number]:
            if taker not in used and number in used:
                continue
            passes = vertices[number].live and taker in learning(number)
            if passes or not vertices[taker].live:
                last[number] = last[number] or last[taker]
            if vertices[number].live:
                cut[number] = cut[number] or (cut[taker] if passes else (taker, number))
        home, edge = index.homes[number], cut[number]
        if edge is not None:
            cut_by.setdefault(edge, set()).add(number)
        if home is not None and home in names:
            last[number] = last[number] or home
            seen = latest.setdefault(home, number)
            latest[home] = max(seen, number, key=lambda v: (v in used, vertices[v].live, v))
    cuts = {edge: index.cut(*edge, cut_by[edge]) for v in latest.values() if (edge := cut[v])}
    for name, number in latest.items():
        end = last[number] or name
        edge = cut[latest[end]]
        yield name, Ending(end, cuts[edge] if edge else None)


_OPEN = -1


def stopped(index: Index, stops: Iterable[Edge], alive: Iterable[str]) -> Stopped:
    """Return what has no way to the loss, or to what is alive, but through one of `stops`."""
    edges = list(dict.fromkeys(stops))
    order = {edge: place for place, edge in enumerate(edges)}
    vertices = index.graph.vertices
    state: list[int | None] = [None] * len(vertices)
    if index.graph.loss is not None:
        state[index.graph.loss] = _OPEN
    for name in alive:
        for number in index.values.get(name, ()):
            state[number] = _OPEN
    for number in range(len(vertices) - 1, -1, -1):
        after = state[number]
        if after is None:
            continue
        for position, operand in enumerate(vertices[number].operands):
            if vertices[number].passes_gradient(position):
                here, known = order.get((number, position), after), state[operand]
                state[operand] = here if known is None else min(known, here)
    by_vertex = {n: edges[s] for n, s in enumerate(state) if s is not None and s != _OPEN}
    first = {
        name: min((s for v in values if (s := state[v]) is not None), default=_OPEN)
        for name, values in index.values.items()
    }
    return Stopped({n: edges[s] for n, s in first.items() if s != _OPEN}, by_vertex)
