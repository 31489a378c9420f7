"""The flow as a figure: who feeds whom, from the batch at the top to the loss at the bottom."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.rendering.diagram import MOST_BOXES, NO_FLOW, Box, Diagram, diagram
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
    places = _layout(drawn)
    width = max((x for x, _ in places.values()), default=0.0) + 1.0
    height = max((y for _, y in places.values()), default=0.0) + 1.0
    figure, axes = new_figure(max(4.5, _WIDTH * width), 1.0 + _HEIGHT * height)
    axes.set_axis_off()
    axes.set_xlim(-0.6, width - 0.4)
    axes.set_ylim(height - 0.4, -0.6)
    found = by_layer(report.violations)
    for arrow in drawn.arrows:
        _draw_arrow(axes, places[arrow.source], places[arrow.target], arrow.passes_gradient)
        if arrow.label:
            _label(axes, places[arrow.source], places[arrow.target], arrow.label)
    for box in drawn.boxes:
        _draw_box(axes, box, places[box.key], bool(_alarms(box, found)))
    set_title(figure, f"flow of {model_name(report)}")
    return figure


def _alarms(box: Box, found: Iterable[str]) -> list[str]:
    return [layer for layer in found if layer == box.label or layer.startswith(f"{box.label}.")]


def _layout(drawn: Diagram) -> dict[str, tuple[float, float]]:
    """Return the place of each box: a row below all that feed it, in line with them."""
    feeding: dict[str, list[str]] = defaultdict(list)
    for arrow in drawn.arrows:
        feeding[arrow.target].append(arrow.source)
    rows = _rows(drawn, feeding)
    members: dict[int, list[str]] = defaultdict(list)
    for box in drawn.boxes:
        members[rows[box.key]].append(box.key)
    at: dict[str, float] = {}
    for row in sorted(members):
        keys = members[row]
        wished = {key: fmean([at[f] for f in feeding[key] if f in at] or [0.0]) for key in keys}
        column = 0.0
        for key in sorted(keys, key=lambda key: wished[key]):
            at[key] = max(column, round(wished[key] * 2) / 2)
            column = at[key] + 1.0
    return {key: (at[key], float(rows[key])) for key in rows}


def _rows(drawn: Diagram, feeding: dict[str, list[str]]) -> dict[str, int]:
    """Return the row of each box, the longest way to it, of its first call where it has several."""
    rows: dict[str, int] = {}
    order = {box.key: index for index, box in enumerate(drawn.boxes)}
    for box in drawn.boxes:
        before = [rows[f] for f in feeding[box.key] if f in rows and order[f] < order[box.key]]
        rows[box.key] = max(before, default=-1) + 1
    takers: dict[str, list[str]] = defaultdict(list)
    for target, sources in feeding.items():
        for source in sources:
            takers[source].append(target)
    for box in drawn.boxes:  # a source stands right above what it feeds first
        if box.kind == "source" and takers[box.key]:
            rows[box.key] = max(0, min(rows[taker] for taker in takers[box.key]) - 1)
    return rows


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


def _draw_arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], passes_gradient: bool
) -> None:
    is_long = abs(end[1] - start[1]) > 1.01 and abs(end[0] - start[0]) < 0.4
    arrow = FancyArrowPatch(
        start,
        end,
        arrowstyle="-|>",
        mutation_scale=8,
        shrinkA=9,
        shrinkB=9,
        connectionstyle=f"arc3,rad={-0.35 if is_long else 0.0}",
        linestyle="-" if passes_gradient else (0, (3, 2)),
        color=INK if passes_gradient else ALARM,
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
