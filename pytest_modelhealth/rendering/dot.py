"""The flow in DOT, the language of Graphviz."""

from __future__ import annotations

from pytest_modelhealth.rendering.diagram import MOST_BOXES, NO_FLOW, diagram
from pytest_modelhealth.report import HealthReport

_SHAPES = {"layer": "box", "source": "ellipse", "end": "doubleoctagon", "join": "circle"}


def render(report: HealthReport, most_boxes: int = MOST_BOXES) -> str:
    """Return the graph; where no gradient goes back the arrow is dashed."""
    drawn = diagram(report, most_boxes)
    if drawn is None:
        return f"digraph flow {{\n  label={_quoted(NO_FLOW)};\n}}\n"
    lines = ["digraph flow {", '  node [fontname="sans-serif", fontsize=10];']
    lines += [
        f"  {_quoted(box.key)} [label={_quoted(box.label)}, shape={_SHAPES[box.kind]}];"
        for box in drawn.boxes
    ]
    for arrow in drawn.arrows:
        style = "" if arrow.passes_gradient else ", style=dashed"
        ends = f"{_quoted(arrow.source)} -> {_quoted(arrow.target)}"
        lines.append(f"  {ends} [label={_quoted(arrow.label)}{style}];")
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
