"""The flow as a Mermaid flowchart, which GitHub, GitLab and most wikis draw."""

from __future__ import annotations

from pytest_modelhealth.rendering.diagram import MOST_BOXES, NO_FLOW, Box, diagram
from pytest_modelhealth.report import HealthReport

_SHAPES = {"layer": '["{}"]', "source": '(["{}"])', "end": '[["{}"]]', "join": '(("{}"))'}


def render(report: HealthReport, most_boxes: int = MOST_BOXES) -> str:
    """Return the flowchart; where no gradient goes back the arrow is dotted."""
    drawn = diagram(report, most_boxes)
    if drawn is None:
        return f'flowchart TD\n  n0["{NO_FLOW}"]\n'
    numbers = {box.key: f"n{index}" for index, box in enumerate(drawn.boxes)}
    lines = ["flowchart TD"]
    lines += [f"  {numbers[box.key]}{_shape(box)}" for box in drawn.boxes]
    for arrow in drawn.arrows:
        line = "-->" if arrow.passes_gradient else "-.->"
        label = f'|"{_escaped(arrow.label)}"|' if arrow.label else ""
        lines.append(f"  {numbers[arrow.source]} {line}{label} {numbers[arrow.target]}")
    return "\n".join(lines) + "\n"


def _shape(box: Box) -> str:
    return _SHAPES[box.kind].format(_escaped(box.label))


def _escaped(text: str) -> str:
    """Return text that Mermaid takes literally: it reads entities by number."""
    return "".join(c if c.isalnum() or c in " ._-:[]()+*/" else f"#{ord(c)};" for c in text)
