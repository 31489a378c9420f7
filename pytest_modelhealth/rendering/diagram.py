"""The flow of a run as boxes and arrows: what Mermaid, DOT and the figure draw.

Views and single operations stand on the arrows; sums, products and whatever else joins two ways are
boxes of their own. A large model is folded into its containers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pytest_modelhealth.report import HealthReport
from pytest_modelhealth.report.flow import (
    AS_IT_IS,
    LOSS,
    OUTPUT,
    PRODUCTS,
    SUMS,
    Flow,
    Graph,
    Kind,
)

MOST_BOXES = 60
"""A picture of more boxes is folded: that many can be read on one page."""


@dataclass(frozen=True)
class Box:
    """A layer, a source, an end of the run, or an operation that joins several.

    Args:
        key: identifies it in the diagram.
        label: what to write in it.
        kind: ``"layer"``, ``"source"``, ``"end"`` or ``"join"``.
    """

    key: str
    label: str
    kind: str


@dataclass(frozen=True)
class Arrow:
    """What goes from one box to another.

    Args:
        source, target: keys of the boxes.
        label: operations on the way, views apart.
        passes_gradient: whether a gradient goes back.
    """

    source: str
    target: str
    label: str = ""
    passes_gradient: bool = True


@dataclass(frozen=True)
class Diagram:
    """Boxes, sources first, and the arrows between them."""

    boxes: tuple[Box, ...]
    arrows: tuple[Arrow, ...]
    depth: int
    """Levels of containers that are opened."""


def diagram(flow: Flow, most_boxes: int = MOST_BOXES) -> Diagram:
    """Return the diagram of a flow, folded until it has no more than so many boxes."""
    graph = flow.graph
    levels = _levels(graph)
    deepest = max(levels, default=0)
    for depth in range(deepest, 1, -1):
        drawn = _Drawing(graph, levels, depth).diagram()
        if len(drawn.boxes) <= most_boxes:
            return drawn
    return _Drawing(graph, levels, 1).diagram()


def drawn_of(report: HealthReport, most_boxes: int) -> Diagram | None:
    """Return the diagram of a report's flow; ``None`` where none was recorded."""
    flow = report.flow
    if flow is None or not flow.graph.vertices:
        return None
    return diagram(flow, most_boxes)


NO_FLOW = "no flow was recorded in this run"


def _levels(graph: Graph) -> list[int]:
    levels: list[int] = []
    for call in graph.calls:
        levels.append(0 if call.parent < 0 else levels[call.parent] + 1)
    return levels


_Way = tuple[str, tuple[str, ...], bool]
"""The box that values come from, the operations since, and whether a gradient goes back."""


class _Drawing:
    def __init__(self, graph: Graph, levels: list[int], depth: int) -> None:
        self._graph = graph
        self._depth = depth
        self._boxes: dict[str, Box] = {}
        self._arrows: dict[tuple[str, str, str], Arrow] = {}
        self._shown = [self._box_of_call(number, levels) for number in range(len(graph.calls))]
        self._read_between = {
            operand
            for vertex in graph.vertices
            if vertex.kind is Kind.OPERATION
            and vertex.call >= 0
            and self._shown[vertex.call] is None
            for operand in vertex.operands
        }

    def _box_of_call(self, number: int, levels: list[int]) -> str | None:
        """Return the layer whose box a call is in; ``None`` where the call is opened."""
        call = self._graph.calls[number]
        if call.last != number and levels[number] < self._depth:
            return None
        while levels[number] > self._depth:
            number = self._graph.calls[number].parent
        return self._graph.calls[number].layer

    def diagram(self) -> Diagram:
        ways: list[_Way | None] = []
        for number in range(len(self._graph.vertices)):
            ways.append(self._way(number, ways))
        if self._graph.loss is None:
            self._end(OUTPUT, (ways[output] for output in self._graph.outputs))
        return Diagram(tuple(self._boxes.values()), tuple(self._arrows.values()), self._depth)

    def _way(self, number: int, ways: list[_Way | None]) -> _Way | None:
        vertex = self._graph.vertices[number]
        if vertex.kind in (Kind.INPUT, Kind.TARGET):
            return (self._add(vertex.name, vertex.name, "source"), (), True)
        if vertex.kind is Kind.PARAMETER and number in self._read_between:
            return (self._add(vertex.name, vertex.name, "source"), (), True)
        given = [
            (way, vertex.passes_gradient(position) or not self._graph.vertices[operand].live)
            for position, operand in enumerate(vertex.operands)
            if (way := ways[operand]) is not None
        ]
        box = self._shown[vertex.call] if vertex.call >= 0 else None
        if box is None and vertex.call < 0 and self._graph.loss is not None:
            box = LOSS
        if box is not None:
            key = self._add(box, box, "end" if box == LOSS and vertex.call < 0 else "layer")
            for (source, operations, is_open), passes in given:
                self._connect(source, key, operations, is_open and passes)
            return (key, (), True)
        return self._operation(number, given)

    def _operation(self, number: int, given: list[tuple[_Way, bool]]) -> _Way | None:
        vertex = self._graph.vertices[number]
        sources = {way[0] for way, _ in given}
        if not sources:
            return None
        if len(sources) == 1:
            (source, operations, is_open), passes = given[0]
            shown = vertex.function not in AS_IT_IS or (vertex.operands and not passes)
            shown = shown and vertex.function not in SUMS
            names = (*operations, vertex.function) if shown else operations
            return (source, names, is_open and passes)
        key = self._add(f"{number}", _symbol(vertex.function), "join")
        for (source, operations, is_open), passes in given:
            self._connect(source, key, operations, is_open and passes)
        return (key, (), True)

    def _end(self, name: str, ways: Iterable[_Way | None]) -> None:
        key = self._add(name, name, "end")
        for way in ways:
            if way is not None:
                self._connect(way[0], key, way[1], way[2])

    def _add(self, key: str, label: str, kind: str) -> str:
        self._boxes.setdefault(key, Box(key, label, kind))
        return key

    def _connect(self, source: str, target: str, operations: tuple[str, ...], open_: bool) -> None:
        if source != target:
            label = " ".join(dict.fromkeys(operations))
            known = self._arrows.get((source, target, label))
            open_ = open_ or (known is not None and known.passes_gradient)
            self._arrows[source, target, label] = Arrow(source, target, label, open_)


def _symbol(function: str) -> str:
    if function in SUMS:
        return "-" if function in ("sub", "isub", "rsub", "subtract") else "+"
    return "*" if function in PRODUCTS else function
