"""Where gradients end on a way."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from pytest_modelhealth.report.flow.graph import Ending
from pytest_modelhealth.report.flow.index import Index


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
