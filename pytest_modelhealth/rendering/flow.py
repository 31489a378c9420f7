"""The flow as a figure: who feeds whom, from the batch at the top to the loss at the bottom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.rendering.diagram import MOST_BOXES, NO_FLOW, Box, diagram
from pytest_modelhealth.rendering.figure import (
    ACTIVATIONS,
    ALARM,
    FAINT,
    INK,
    PARAMETERS,
    model_name,
    new_figure,
    set_title,
)
from pytest_modelhealth.rendering.layout import layered
from pytest_modelhealth.rendering.notation import shorten
from pytest_modelhealth.rendering.summary import by_layer
from pytest_modelhealth.report import HealthReport

_FILLS = {"layer": "white", "source": "#eef3fa", "end": "#fdf3e6", "join": FAINT}
_EDGES = {"layer": ACTIVATIONS, "source": INK, "end": PARAMETERS, "join": INK}
_WIDTH, _HEIGHT = 2.3, 0.62
"""Inches between boxes of a row, and between rows."""


def plot_flow(report: HealthReport, most_boxes: int = MOST_BOXES) -> Figure:
    """Return a figure of who feeds whom; layers with violations are red.

    A dashed arrow lets no gradient back. A model of more than `most_boxes` boxes is folded into its
    containers.

    Raises:
        InspectionError: no flow was recorded.
    """
    drawn = diagram(report, most_boxes)
    if drawn is None:
        compiled = 'code observed as compiled has none; inspect it with compiled="eager"'
        why = "; ".join(report.flow.notes if report.flow is not None else ())
        raise InspectionError(f"{NO_FLOW}: {why or compiled}")
    layout = layered(
        {box.key: 1.0 for box in drawn.boxes},
        [(arrow.source, arrow.target, "") for arrow in drawn.arrows],
        gap=0.0,
        lane=0.25,
    )
    width = layout.width
    height = max(layout.row.values(), default=0) + 1.0
    figure, axes = new_figure(max(4.5, _WIDTH * width), 1.0 + _HEIGHT * height)
    axes.set_axis_off()
    axes.set_xlim(-0.1, width + 0.1)
    axes.set_ylim(height - 0.4, -0.6)
    found = by_layer(report.violations)
    for arrow, route, is_back in zip(drawn.arrows, layout.routes, layout.is_back, strict=True):
        way = route[::-1] if is_back else route
        _draw_arrow(axes, way, arrow.passes_gradient)
        if arrow.label:
            _label(axes, way[0], way[1], arrow.label)
    for box in drawn.boxes:
        place = (layout.x[box.key], layout.row[box.key])
        _draw_box(axes, box, place, bool(_alarms(box, found)))
    set_title(figure, f"flow of {model_name(report)}")
    return figure


def _alarms(box: Box, found: Iterable[str]) -> list[str]:
    return [layer for layer in found if layer == box.label or layer.startswith(f"{box.label}.")]


def _draw_box(axes: Axes, box: Box, place: tuple[float, float], has_violation: bool) -> None:
    shape = "circle,pad=0.25" if box.kind == "join" else "round,pad=0.35"
    axes.text(
        *place,
        shorten(box.label, 26),
        ha="center",
        va="center",
        fontsize=8,
        color=ALARM if has_violation else INK,
        parse_math=False,
        zorder=3,
        bbox={
            "boxstyle": shape,
            "facecolor": _FILLS[box.kind],
            "edgecolor": ALARM if has_violation else _EDGES[box.kind],
            "linewidth": 1.6 if has_violation else 0.9,
        },
    )


def _draw_arrow(axes: Axes, way: Sequence[tuple[float, float]], passes_gradient: bool) -> None:
    colour, style = (INK, "-") if passes_gradient else (ALARM, (0, (3, 2)))
    axes.plot(*zip(*way[:-1], strict=True), color=colour, linestyle=style, linewidth=0.9, zorder=1)
    arrow = FancyArrowPatch(
        *way[-2:],
        arrowstyle="-|>",
        mutation_scale=8,
        shrinkA=0 if len(way) > 2 else 9,
        shrinkB=9,
        linestyle=style,
        color=colour,
        linewidth=0.9,
        zorder=1,
    )
    axes.add_patch(arrow)


def _label(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str) -> None:
    axes.text(
        (start[0] + end[0]) / 2 + 0.03,
        (start[1] + end[1]) / 2,
        shorten(text, 24),
        fontsize=6.5,
        color=INK,
        ha="left",
        va="center",
        parse_math=False,
        zorder=2,
    )
