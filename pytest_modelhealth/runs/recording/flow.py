"""Who feeds whom, as edges, and the way from the batch through the culprit to the end."""

from __future__ import annotations

from typing import Any

import networkx as nx

from pytest_modelhealth.rendering.diagram import Diagram, diagram
from pytest_modelhealth.report import HealthReport
from pytest_modelhealth.settings.layer_names import is_inside

_ALL = 1 << 30


def of_flow(report: HealthReport) -> dict[str, Any] | None:
    """Return a report's flow by the keys of the file of a run; ``None`` where none was recorded."""
    drawn = diagram(report, most_boxes=_ALL)
    if drawn is None or report.flow is None:
        return None
    names = {
        box.key: f"{box.label} #{box.key}" if box.kind == "join" else box.key for box in drawn.boxes
    }
    edges = [
        [names[arrow.source], names[arrow.target], arrow.passes_gradient, arrow.label.split()]
        for arrow in drawn.arrows
    ]
    violations = report._judgement.violations
    way = _way(drawn, violations[0].layer) if violations else []
    return {
        "edges": edges,
        "joins": [names[box.key] for box in drawn.boxes if box.kind == "join"],
        "way": [names[key] for key in way],
        "exact": report.flow.is_exact,
    }


def _way(drawn: Diagram, culprit: str) -> list[str]:
    """Return the shortest way from the batch through the culprit, or the first layer inside it."""
    keys = [box.key for box in drawn.boxes]
    inside = (key for key in keys if key == culprit or is_inside(key, culprit))
    through = next(inside, None)
    if through is None:
        return []
    graph = nx.DiGraph((arrow.source, arrow.target) for arrow in drawn.arrows)
    graph.add_node(through)
    before, after = (
        _shortest(ways, through, {box.key for box in drawn.boxes if box.kind == kind})
        for ways, kind in ((graph.reverse(copy=False), "source"), (graph, "end"))
    )
    return [*reversed(before), *after[1:]]


def _shortest(graph: nx.DiGraph, start: str, ends: set[str]) -> list[str]:
    """Return the shortest way from `start` to one of `ends`; `start` alone where there is none."""
    ways = nx.single_source_shortest_path(graph, start)
    return next((way for name, way in ways.items() if name in ends), [start])
