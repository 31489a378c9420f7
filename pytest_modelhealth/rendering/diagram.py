"""The flow of a run as boxes and arrows: what Mermaid, DOT and the figure draw.

Views and single operations stand on the arrows; sums, products and whatever else joins two ways are
boxes of their own. A large model is folded into its containers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pytest_modelhealth.report import HealthReport
from pytest_modelhealth.report.flow import (
    AS_IT_IS,
    LOSS,
    OUTPUT,
    PRODUCTS,
    SUMS,
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


NO_FLOW = "no flow was recorded in this run"


def diagram(report: HealthReport, most_boxes: int = MOST_BOXES) -> Diagram | None:
    """Return the diagram of a report's flow, folded until it has no more than so many boxes.

    ``None`` where no flow was recorded.
    """
    if report.flow is None or not report.flow.graph.vertices:
        return None
    graph = report.flow.graph
    levels = _levels(graph)
    for depth in range(max(levels, default=0), 1, -1):
        drawn = _Drawing(graph, levels, depth).diagram()
        if len(drawn.boxes) <= most_boxes:
            return drawn
    return _Drawing(graph, levels, 1).diagram()


def _levels(graph: Graph) -> list[int]:
    levels: list[int] = []
    for call in graph.calls:
        levels.append(0 if call.parent < 0 else levels[call.parent] + 1)
    return levels


class _Way(NamedTuple):
    """The box that values come from, the operations since, and whether a gradient goes back."""

    source: str
    operations: tuple[str, ...] = ()
    is_open: bool = True


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
            key = self._box(OUTPUT, "end")
            for way in filter(None, (ways[output] for output in self._graph.outputs)):
                self._connect(way, key)
        return Diagram(tuple(self._boxes.values()), tuple(self._arrows.values()))

    def _way(self, number: int, ways: list[_Way | None]) -> _Way | None:
        vertex = self._graph.vertices[number]
        is_read = vertex.kind is Kind.PARAMETER and number in self._read_between
        if is_read or vertex.kind in (Kind.INPUT, Kind.TARGET):
            return _Way(self._box(vertex.name, "source"))
        given = [
            (way, vertex.passes_gradient(position) or not self._graph.vertices[operand].live)
            for position, operand in enumerate(vertex.operands)
            if (way := ways[operand]) is not None
        ]
        layer = self._shown[vertex.call] if vertex.call >= 0 else None
        if layer is not None:
            return self._joined(given, self._box(layer, "layer"))
        if vertex.call < 0 and self._graph.loss is not None:
            return self._joined(given, self._box(LOSS, "end"))
        return self._operation(number, given)

    def _operation(self, number: int, given: list[tuple[_Way, bool]]) -> _Way | None:
        if not given:
            return None
        function = self._graph.vertices[number].function
        if len({way.source for way, _ in given}) > 1:
            return self._joined(given, self._box(f"{number}", "join", _symbol(function)))
        (source, operations, is_open), passes = given[0]
        is_named = function not in SUMS and (function not in AS_IT_IS or not passes)
        names = (*operations, function) if is_named else operations
        return _Way(source, names, is_open and passes)

    def _joined(self, given: list[tuple[_Way, bool]], key: str) -> _Way:
        for way, passes in given:
            self._connect(way._replace(is_open=way.is_open and passes), key)
        return _Way(key)

    def _box(self, key: str, kind: str, label: str = "") -> str:
        self._boxes.setdefault(key, Box(key, label or key, kind))
        return key

    def _connect(self, way: _Way, target: str) -> None:
        if way.source != target:
            arrow = way.source, target, " ".join(dict.fromkeys(way.operations))
            known = self._arrows.get(arrow)
            is_open = way.is_open or (known is not None and known.passes_gradient)
            self._arrows[arrow] = Arrow(*arrow, is_open)


def _symbol(function: str) -> str:
    if function in SUMS:
        return "-" if function in ("sub", "isub", "rsub", "subtract") else "+"
    return "*" if function in PRODUCTS else function
