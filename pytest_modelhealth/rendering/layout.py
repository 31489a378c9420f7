"""Where the boxes of a graph stand: in rows, below all that feed them, with few crossings.

After Sugiyama, Tagawa and Toda (1981): arrows that close a cycle are turned for the time being, a
box stands below the longest way to it, long arrows are led through every row between, and rows are
sorted by the mean place of their neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

import networkx as nx

_GAP, _LANE = 14.0, 8.0
"""Pixels between the boxes of a row, and for an arrow that passes a row."""

_SORTINGS, _PLACINGS = 12, 9


class Layout(NamedTuple):
    """Places of boxes and arrows.

    Args:
        x: the centre of each box across, from 0.
        row: the row of each box, from 0 at the top.
        width: of the whole.
        routes: of each arrow, where it passes (x, row), from the upper box to the lower.
        is_back: of each arrow, whether it leads upward.
    """

    x: dict[Any, float]
    row: dict[Any, int]
    width: float
    routes: list[list[tuple[float, int]]]
    is_back: list[bool]


def layered(widths: Mapping[Any, float], arrows: Sequence[tuple[Any, Any, str]]) -> Layout:
    """Return the places of boxes.

    Args:
        widths: of each box, in order.
        arrows: from one box to another, and a style; those of a style that leave a box together
            share their way, and ``"way"`` is kept straightest.
    """
    turned = _closing(widths, arrows)
    ends = [(b, a) if back else (a, b) for (a, b, _), back in zip(arrows, turned, strict=True)]
    boxes = nx.DiGraph()
    boxes.add_nodes_from(widths)
    boxes.add_edges_from((a, b) for a, b in ends if a != b)
    generations = enumerate(nx.topological_generations(boxes))
    row: dict[Any, int] = {box: number for number, members in generations for box in members}
    for box in widths:  # a source stands right above what it feeds first
        if boxes.out_degree(box) and not boxes.in_degree(box):
            row[box] = min(row[other] for other in boxes[box]) - 1
    graph = nx.DiGraph()  # of boxes and lanes, each edge from a row to the next
    graph.add_nodes_from((box, {"size": width}) for box, width in widths.items())
    paths = []
    for (upper, lower), (_, _, style), is_back in zip(ends, arrows, turned, strict=True):
        lanes = [(upper, style, is_back, at) for at in range(row[upper] + 1, row[lower])]
        graph.add_nodes_from(lanes, size=_LANE)
        row.update({lane: lane[-1] for lane in lanes})
        paths.append([upper, *lanes, lower])
        for a, b in pairwise(paths[-1]) if upper != lower else ():
            pull = 10 if "way" in style else 6 if lanes else 2
            if lanes and not (a in lanes and b in lanes):
                pull = 1  # a box may stand aside of the lanes that end there
            known = graph.edges[a, b]["pull"] if graph.has_edge(a, b) else 0
            graph.add_edge(a, b, pull=max(pull, known))
    rows: list[list[Any]] = [[] for _ in range(max(row.values(), default=-1) + 1)]
    for vertex, number in row.items():
        rows[number].append(vertex)
    _sort(rows, graph)
    x: dict[Any, float] = {}
    for placing in range(_PLACINGS):  # the last one goes downward
        toward = graph.pred if placing % 2 == 0 else graph.succ
        for vertices in rows if placing % 2 == 0 else reversed(rows):
            _place_row(vertices, graph.nodes, toward, x)
    left = min((x[v] - graph.nodes[v]["size"] / 2 for v in x), default=0.0)
    right = max((x[v] + graph.nodes[v]["size"] / 2 for v in x), default=0.0)
    routes = [[(x[vertex] - left, row[vertex]) for vertex in path] for path in paths]
    places = {box: x[box] - left for box in widths}
    return Layout(places, {box: row[box] for box in widths}, right - left, routes, turned)


def _closing(boxes: Mapping[Any, float], arrows: Sequence[tuple[Any, Any, str]]) -> list[bool]:
    """Return which arrows lead back to a box that is still being walked, from the sources on."""
    graph = nx.DiGraph((a, b) for a, b, _ in arrows)
    start = ()  # no box: leads to all of them, sources first
    known = [box for box in boxes if box in graph]
    graph.add_edges_from((start, box) for box in sorted(known, key=graph.in_degree))
    walked, back = set(), set()
    for upper, lower, step in nx.dfs_labeled_edges(graph, start):
        if step == "forward":
            walked.add(lower)
        elif step == "reverse":
            walked.discard(lower)
        elif lower in walked:
            back.add((upper, lower))
    return [a != b and (a, b) in back for a, b, _ in arrows]


def _sort(rows: list[list[Any]], graph: nx.DiGraph) -> None:
    """Order each row by the mean places of the neighbours, so that few arrows cross."""
    place = {vertex: float(at) for members in rows for at, vertex in enumerate(members)}
    for sorting in range(_SORTINGS):
        near, order = (graph.succ, rows[::-1]) if sorting % 2 else (graph.pred, rows)
        for members in order:
            wish = {v: fmean(place[o] for o in near[v]) if near[v] else place[v] for v in members}
            members.sort(key=wish.__getitem__)
            place.update({vertex: float(at) for at, vertex in enumerate(members)})


def _place_row(members: Sequence[Any], nodes: Any, toward: Any, x: dict[Any, float]) -> None:
    """Give the vertices of a row the places nearest to their neighbours' that keep them apart."""
    blocks: list[tuple[float, float, list[float]]] = []  # of the first, weight, distances from it
    offset, before = 0.0, None
    for vertex in members:
        if before is not None:
            offset += (nodes[before]["size"] + nodes[vertex]["size"]) / 2 + _GAP
        ties = [(x[other], tie["pull"]) for other, tie in toward[vertex].items() if other in x]
        places = sorted(place for place, pull in ties for _ in range(pull))  # median: straight
        middle = (places[len(places) // 2] + places[(len(places) - 1) // 2]) / 2 if ties else 0.0
        wish = middle if ties else x.get(vertex, offset)
        weight = float(max((pull for _, pull in ties), default=0)) or 0.01
        blocks.append((wish - offset, weight, [offset]))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:  # pool adjacent violators
            (wish_b, weight_b, after), (wish_a, weight_a, first) = blocks.pop(), blocks.pop()
            weight = weight_a + weight_b
            mean = (wish_a * weight_a + wish_b * weight_b) / weight
            blocks.append((mean, weight, first + after))
        before = vertex
    settled = [wish + own for wish, _, distances in blocks for own in distances]
    x.update(zip(members, settled, strict=True))
