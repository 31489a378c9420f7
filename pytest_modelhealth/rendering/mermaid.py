"""The flow as a Mermaid flowchart, which GitHub, GitLab and most wikis draw."""

from __future__ import annotations

from pytest_modelhealth.rendering.diagram import MOST_BOXES, NO_FLOW, written
from pytest_modelhealth.report import HealthReport

_SHAPES = {"layer": '["{}"]', "source": '(["{}"])', "end": '[["{}"]]', "join": '(("{}"))'}


def render(report: HealthReport, most_boxes: int = MOST_BOXES) -> str:
    """Return the flowchart; where no gradient goes back the arrow is dotted."""
    drawn = written(report, most_boxes, _SHAPES)
    if drawn is None:
        return f'flowchart TD\n  n0["{NO_FLOW}"]\n'
    boxes, arrows = drawn
    numbers = {name: f"n{index}" for index, (name, *_) in enumerate(boxes)}
    lines = ["flowchart TD"]
    lines += [f"  {numbers[name]}{shape.format(_escaped(text))}" for name, text, shape in boxes]
    for source, target, text, is_cut in arrows:
        label = f'|"{_escaped(text)}"|' if text else ""
        lines.append(f"  {numbers[source]} {'-.->' if is_cut else '-->'}{label} {numbers[target]}")
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    """Return text that Mermaid takes literally: it reads entities by number."""
    return "".join(c if c.isalnum() or c in " ._-:[]()+*/" else f"#{ord(c)};" for c in text)
