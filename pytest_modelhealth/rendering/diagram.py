"""The flow of a run as boxes and arrows: what the page and the figure draw.

Views and single operations stand on the arrows; sums, products and whatever else joins two ways are
boxes of their own, ``"+ #45"``. A large model is folded into its containers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from pytest_modelhealth.report.flow import LOSS, OUTPUT, Flow, Kind, Vertex

ELLIPSIS = " \N{HORIZONTAL ELLIPSIS} "

Edge = Sequence[Any]  # two boxes, whether a gradient goes back, operations between, views apart


class _Way(NamedTuple):
    """The box that values come from, the operations since, and whether a gradient goes back."""

    source: str
    operations: tuple[str, ...] = ()
    is_open: bool = True


def diagram(flow: Flow) -> tuple[list[Edge], dict[str, str]]:
    """Return what goes from box to box, and the kind of each box, sources first.

    Boxes are innermost layers, sources, ends and what joins ways between them: of the kinds
    ``"layer"``, ``"source"``, ``"end"`` and ``"join"``.
    """
    graph, vertices = flow.graph, flow.graph.vertices
    homed = zip(vertices, flow.homes, strict=True)
    read_between = {o for v, home in homed if home is None and v.call >= 0 for o in v.operands}
    kinds: dict[str, str] = {}
    passing: dict[tuple[str, str, tuple[str, ...]], bool] = {}
    ways: list[_Way | None] = []

    def joined(operands: Iterable[tuple[_Way, bool]], box: str, kind: str) -> _Way:
        kinds.setdefault(box, kind)
        others = (one for one in operands if one[0].source != box)
        for (source, operations, is_open), passes in others:
            edge = source, box, tuple(dict.fromkeys(operations))
            passing[edge] = (is_open and passes) or passing.get(edge, False)
        return _Way(box)

    def way_of(number: int, vertex: Vertex) -> _Way | None:
        is_read = vertex.kind is Kind.PARAMETER and number in read_between
        if is_read or vertex.kind in (Kind.INPUT, Kind.TARGET):
            return joined([], vertex.name, "source")
        operands = [
            (way, vertex.passes_gradient(position) or not vertices[operand].live)
            for position, operand in enumerate(vertex.operands)
            if (way := ways[operand]) is not None
        ]
        layer = flow.homes[number] if vertex.call >= 0 else None
        if layer is not None:
            return joined(operands, layer, "layer")
        if vertex.call < 0 and graph.loss is not None:
            return joined(operands, LOSS, "end")
        if len({way.source for way, _ in operands}) > 1:
            symbols = {"difference": "-", "sum": "+", "product": "*"}
            held = (symbol for trait, symbol in symbols.items() if vertex.has(trait))
            return joined(operands, f"{next(held, vertex.function)} #{number}", "join")
        if not operands:
            return None
        (source, operations, is_open), passes = operands[0]
        is_named = not vertex.has("sum") and not (vertex.has("view") and passes)
        names = (*operations, vertex.function) if is_named else operations
        return _Way(source, names, is_open and passes)

    for number, vertex in enumerate(vertices):
        ways.append(way_of(number, vertex))
    outputs = graph.outputs if graph.loss is None else ()
    joined([(way, True) for output in outputs if (way := ways[output])], OUTPUT, "end")
    return [[a, b, passes, [*names]] for (a, b, names), passes in passing.items()], kinds


def is_join(name: str) -> bool:
    """Return whether this is an operation that joins several ways, which is numbered: "+ #45"."""
    return bool(re.search(r" #\d+$", name))


# Folding


class Box(NamedTuple):
    """What is drawn as one: the boxes folded into it, and its name, that of the ends of a range."""

    ends: tuple[str, ...]
    leaves: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of a layer or a container, or of the first and the last of several."""
        return ELLIPSIS.join(self.ends)


@dataclass
class Arrow:
    """All edges from a box to another, by numbers of the boxes."""

    source: int
    target: int
    is_cut: bool
    operations: dict[str, None] = field(default_factory=dict)


_NEAR = 2  # boxes before and after what is looked at that stay by themselves
_DEEPEST = 8  # levels that are opened


def folded(
    names: Collection[str], edges: Iterable[Edge], most: int, focus: str | None = None
) -> list[Box]:
    """Return at most `most` boxes, in the order of their first parts.

    An operation is folded with the last layer that feeds it; the containers around `focus`, a layer
    or a container, are opened first.
    """
    if len(names) <= most:
        return [Box((name,), (name,)) for name in names]
    places: dict[str, str] = {}
    for source, target, *_ in edges:
        if is_join(target) and (target not in places or not is_join(source)):
            outer = str(places.get(source, source)).rpartition(".")[0]
            places[target] = f"{outer}." * bool(outer) + target.replace(".", " ")
    paths = {name: tuple(places.get(name, name).split(".")) for name in names}
    near = () if focus is None else tuple(places.get(focus, focus).split("."))
    boxes: list[Box] = []
    for depth in range(1, _DEEPEST):  # below the containers that what is looked at lies in, too
        groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for name, path in paths.items():
            common = takewhile(lambda pair: pair[0] == pair[1], zip(path, near, strict=False))
            groups[path[: sum(1 for _ in common) + depth]].append(name)
        if boxes and len(groups) > most:
            break
        boxes = [
            Box((leaves[0] if len(leaves) == 1 else ".".join(path),), tuple(leaves))
            for path, leaves in groups.items()
        ]
    looked_at = (any(paths[n][: len(near)] == near for n in box.leaves) for box in boxes)
    at = next((at for at, is_near in enumerate(looked_at) if is_near), 0)
    return boxes if len(boxes) <= most else _ranges(boxes, at, most)


def _ranges(boxes: Sequence[Box], at: int, most: int) -> list[Box]:
    """Return boxes side by side as one, but for those near a place."""
    size = -(-len(boxes) // (most - 2 * _NEAR - 3))
    spans: list[list[Box]] = [[]]
    for index, box in enumerate(boxes):
        if abs(index - at) <= _NEAR:
            spans += [[box], []]
        elif len(spans[-1]) < size:
            spans[-1].append(box)
        else:
            spans.append([box])
    return [
        Box(
            tuple(dict.fromkeys((span[0].name, span[-1].name))),
            tuple(leaf for box in span for leaf in box.leaves),
        )
        for span in spans
        if span
    ]


def arrows(boxes: Sequence[Box], edges: Iterable[Edge]) -> list[Arrow]:
    """Return one arrow for all edges from a box to another, apart by whether gradients go back."""
    box_of = {leaf: index for index, box in enumerate(boxes) for leaf in box.leaves}
    joined: dict[tuple[int, int, bool], Arrow] = {}
    for source, target, passes, operations in edges:
        a, b = box_of[source], box_of[target]
        if a != b or source == target:
            arrow = joined.setdefault((a, b, passes), Arrow(a, b, not passes))
            if len(arrow.operations) < 6:
                arrow.operations.update(dict.fromkeys(operations))
    return list(joined.values())
