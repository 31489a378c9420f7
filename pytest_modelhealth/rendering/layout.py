"""Where the boxes of a graph stand: in rows, below all that feed them, with few crossings.

After Sugiyama, Tagawa and Toda (1981): arrows that close a cycle are turned for the time being, a
box stands below the longest way to it, long arrows are led through every row between, and rows are
sorted by the mean place of their neighbours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

import networkx as nx

_SORTINGS = 12
_PLACINGS = 9
_PULL = {"way": 10, "through": 6, "direct": 2}
"""How straight arrows are kept: those on the lit way, those that pass rows, and all others."""

_Vertex = Any


@dataclass(frozen=True)
class Layout:
    """Places of boxes and arrows.

    Args:
        x: the centre of each box across, from 0.
        row: the row of each box, from 0 at the top.
        width: of the whole.
        routes: of each arrow, where it passes (x, row), from the upper box to the lower.
        is_back: of each arrow, whether it leads upward.
    """

    x: dict[str, float]
    row: dict[str, int]
    width: float
    routes: list[list[tuple[float, int]]]
    is_back: list[bool]


def layered(
    widths: Mapping[str, float],
    arrows: Sequence[tuple[str, str, str]],
    *,
    gap: float,
    lane: float,
) -> Layout:
    """Return the places of boxes.

    Args:
        widths: of each box, in order.
        arrows: from one box to another, and a style; those of a style that leave a box together
            share their way, and ``"way"`` is kept straightest.
        gap: between the boxes of a row.
        lane: the width of an arrow that passes a row.
    """
    turned = _closing(widths, arrows)
    graph = nx.DiGraph()
    graph.add_nodes_from(widths)
    ends = [
        (b, a) if is_back else (a, b) for (a, b, _), is_back in zip(arrows, turned, strict=True)
    ]
    graph.add_edges_from((a, b) for a, b in ends if a != b)
    row: dict[_Vertex, int] = {}
    for number, members in enumerate(nx.topological_generations(graph)):
        row.update(dict.fromkeys(members, number))
    for box in widths:  # a source stands right above what it feeds first
        if graph.out_degree(box) and not graph.in_degree(box):
            row[box] = min(row[other] for other in graph[box]) - 1
    size: dict[_Vertex, float] = dict(widths)
    ties: dict[tuple[_Vertex, _Vertex], int] = {}
    paths: list[list[_Vertex]] = []
    for (upper, lower), (_, _, style), is_back in zip(ends, arrows, turned, strict=True):
        through = range(row[upper] + 1, row[lower])
        lanes = [(upper, style, is_back, number) for number in through]
        size.update(dict.fromkeys(lanes, lane))
        row.update({vertex: vertex[3] for vertex in lanes})
        paths.append([upper, *lanes, lower])
        for pair in pairwise(paths[-1]) if upper != lower else ():
            is_through = not lanes or (pair[0] != upper and pair[1] != lower)
            kind = "way" if "way" in style else "through" if lanes else "direct"
            ties[pair] = max(ties.get(pair, 0), _PULL[kind] if is_through else 1)
    rows = _sorted_rows(row, ties)
    x = _placed(rows, size, ties, gap)
    left = min((x[v] - size[v] / 2 for v in x), default=0.0)
    right = max((x[v] + size[v] / 2 for v in x), default=0.0)
    routes = [[(x[vertex] - left, row[vertex]) for vertex in way] for way in paths]
    places = {box: x[box] - left for box in widths}
    return Layout(places, {box: row[box] for box in widths}, right - left, routes, turned)


def _closing(boxes: Iterable[str], arrows: Sequence[tuple[str, str, str]]) -> list[bool]:
    """Return which arrows lead back to a box that is still being walked, from the sources on."""
    graph = nx.DiGraph((a, b) for a, b, _ in arrows)
    start = ()  # no box: leads to all of them, sources first
    known = [box for box in boxes if box in graph]
    graph.add_edges_from((start, box) for box in sorted(known, key=graph.in_degree))
    being_walked, back = set(), set()
    for upper, lower, step in nx.dfs_labeled_edges(graph, start):
        if step == "forward":
            being_walked.add(lower)
        elif step == "reverse":
            being_walked.discard(lower)
        elif lower in being_walked:
            back.add((upper, lower))
    return [a != b and (a, b) in back for a, b, _ in arrows]


def _sorted_rows(
    row: Mapping[_Vertex, int], ties: Mapping[tuple[_Vertex, _Vertex], int]
) -> list[list[_Vertex]]:
    """Order each row by the mean places of the neighbours; keep the order with fewest crossings."""
    rows: list[list[_Vertex]] = [[] for _ in range(max(row.values(), default=-1) + 1)]
    for vertex, number in row.items():
        rows[number].append(vertex)
    above, below = defaultdict(list), defaultdict(list)
    for upper, lower in ties:
        above[lower].append(upper)
        below[upper].append(lower)
    best, fewest = [list(members) for members in rows], _crossings(rows, below)
    for sorting in range(_SORTINGS if fewest else 0):
        near, order = (above, rows) if sorting % 2 == 0 else (below, rows[::-1])
        place = {vertex: float(at) for members in rows for at, vertex in enumerate(members)}
        for members in order:
            wish = {v: fmean(place[o] for o in near[v]) if near[v] else place[v] for v in members}
            members.sort(key=wish.__getitem__)
            place.update({vertex: float(at) for at, vertex in enumerate(members)})
        found = _crossings(rows, below)
        if found < fewest:
            best, fewest = [list(members) for members in rows], found
    return best


def _crossings(rows: Sequence[Sequence[_Vertex]], below: Mapping[_Vertex, list[_Vertex]]) -> int:
    place = {vertex: at for members in rows for at, vertex in enumerate(members)}
    found = 0
    for members in rows:
        lower: list[int] = []
        for vertex in members:
            ends = [place[other] for other in below.get(vertex, ())]
            found += sum(other > end for end in ends for other in lower)
            lower += ends
    return found


def _placed(
    rows: Sequence[Sequence[_Vertex]],
    size: Mapping[_Vertex, float],
    ties: Mapping[tuple[_Vertex, _Vertex], int],
    gap: float,
) -> dict[_Vertex, float]:
    """Pull every vertex to where its strongest neighbours stand, as far as its row has room."""
    above: dict[_Vertex, list[tuple[_Vertex, int]]] = defaultdict(list)
    below: dict[_Vertex, list[tuple[_Vertex, int]]] = defaultdict(list)
    for (upper, lower), pull in ties.items():
        above[lower].append((upper, pull))
        below[upper].append((lower, pull))
    x: dict[_Vertex, float] = {}
    for placing in range(_PLACINGS):
        is_downward = placing % 2 == 0
        for members in rows if is_downward else reversed(rows):
            _place_row(members, size, above if is_downward else below, gap, x)
    return x


def _place_row(
    members: Sequence[_Vertex],
    size: Mapping[_Vertex, float],
    ties: Mapping[_Vertex, list[tuple[_Vertex, int]]],
    gap: float,
    x: dict[_Vertex, float],
) -> None:
    """Give the vertices of a row the places nearest to their wishes that keep them apart."""
    blocks: list[tuple[float, float, list[float]]] = []  # of the first, weight, distances from it
    offset, before = 0.0, None
    for vertex in members:
        offset += (size[before] + size[vertex]) / 2 + gap if before is not None else 0.0
        known = [(x[other], pull) for other, pull in ties.get(vertex, ()) if other in x]
        wish = _median(known) if known else x.get(vertex, offset)
        weight = float(max((pull for _, pull in known), default=0)) or 0.01
        blocks.append((wish - offset, weight, [offset]))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:  # pool adjacent violators
            (wish_b, weight_b, held_b), (wish_a, weight_a, held_a) = blocks.pop(), blocks.pop()
            weight = weight_a + weight_b
            mean = (wish_a * weight_a + wish_b * weight_b) / weight
            blocks.append((mean, weight, held_a + held_b))
        before = vertex
    places = [wish + own for wish, _, held in blocks for own in held]
    x.update(zip(members, places, strict=True))


def _median(weighted: list[tuple[float, int]]) -> float:
    """Return the weighted median: the place of a neighbour, so that arrows become straight."""
    weighted.sort()
    rest = sum(pull for _, pull in weighted) / 2
    at = -1
    while rest > 0:
        at += 1
        rest -= weighted[at][1]
    return weighted[at][0] if rest else fmean((weighted[at][0], weighted[at + 1][0]))
