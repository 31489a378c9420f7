"""The flow in DOT, the language of Graphviz."""

from __future__ import annotations

from pytest_modelhealth.rendering.diagram import MOST_BOXES, NO_FLOW, written
from pytest_modelhealth.report import HealthReport

_SHAPES = {"layer": "box", "source": "ellipse", "end": "doubleoctagon", "join": "circle"}


def render(report: HealthReport, most_boxes: int = MOST_BOXES) -> str:
    """Return the graph; where no gradient goes back the arrow is dashed."""
    drawn = written(report, most_boxes, _SHAPES)
    if drawn is None:
        return f"digraph flow {{\n  label={_quoted(NO_FLOW)};\n}}\n"
    boxes, arrows = drawn
    lines = ["digraph flow {", '  node [fontname="sans-serif", fontsize=10];']
    for name, text, shape in boxes:
        lines.append(f"  {_quoted(name)} [label={_quoted(text)}, shape={shape}];")
    for source, target, text, is_cut in arrows:
        style = ", style=dashed" * is_cut
        lines.append(f"  {_quoted(source)} -> {_quoted(target)} [label={_quoted(text)}{style}];")
    return "\n".join([*lines, "}"]) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
