"""What figures of a training through time share: panels above each other, and marks in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.colors import Colormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pytest_modelhealth.rendering.figure import ALARM, INK, HealthFigure, drawable
from pytest_modelhealth.rendering.notation import shorten
from pytest_modelhealth.rendering.progress import layer_label
from pytest_modelhealth.training.monitoring.history import History
from pytest_modelhealth.training.monitoring.row import Event

Reals = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

FAINT, MISSING, USUAL = "#dfe3e8", "#c9ccd1", "#dff0d8"

NAME_WIDTH = 36
"""Characters of a name in a figure."""

_WIDTH = 11.0
"""Inches."""

_MOST_EVENTS = 8
"""Events that are written out below a figure."""

_MOST_CROSSES = 60

_NEAR = 0.02
"""Events nearer to each other, as a part of the axis, share a number."""


def new_timeline(
    history: History, title: str, heights: Sequence[float]
) -> tuple[Figure, list[Axes], list[Axes]]:
    """Return a figure, its panels over the same steps, and a narrow place to the right of each."""
    size = (_WIDTH, sum(heights) + 0.5 * len(heights) + 0.7)
    figure = HealthFigure(figsize=size, layout="constrained", facecolor="white")
    ratios = {"height_ratios": list(heights), "width_ratios": [1.0, 0.014]}
    grid = figure.subplots(len(heights), 2, squeeze=False, gridspec_kw=ratios)
    panels, sides = list(grid[:, 0]), list(grid[:, 1])
    for axes, side in zip(panels, sides, strict=True):
        side.set_axis_off()
        axes.set_facecolor("white")
        axes.set_axisbelow(True)
        axes.tick_params(
            colors=INK, labelsize=8.5, length=3, labelbottom=axes is panels[-1]
        )  # fmt: skip
        for place, spine in axes.spines.items():
            spine.set_visible(place in ("left", "bottom"))
            spine.set_color(INK)
        if axes is not panels[0]:
            axes.sharex(panels[0])
    edges = step_edges(history.steps)
    panels[0].set_xlim(edges[0], edges[-1])
    panels[0].xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    panels[-1].set_xlabel("step", color=INK, fontsize=9)
    figure.suptitle(
        title, x=0.01, ha="left", fontsize=11.5, fontweight="bold", color=INK, parse_math=False
    )
    return figure, panels, sides


def set_subtitle(axes: Axes, text: str) -> None:
    """Put a line at the top left of the axes, taken literally."""
    axes.set_title(text, loc="left", fontsize=9, color=INK, parse_math=False)


def set_legend(axes: Axes, **look: object) -> None:
    """Name what is drawn, at the right above a panel."""
    look = {"bbox_to_anchor": (1, 0.97), "ncols": 4, "borderaxespad": 0.2} | look
    axes.legend(loc="lower right", frameon=False, fontsize=8, labelcolor=INK, **look)


def step_edges(steps: npt.NDArray[np.int64]) -> Reals:
    """Return where the cells of steps begin and end: half way to the next."""
    between = (steps[1:] + steps[:-1]) / 2
    first = between[0] - steps[0] if len(between) else 0.5
    last = steps[-1] - between[-1] if len(between) else 0.5
    return np.concatenate([[steps[0] - first], between, [steps[-1] + last]])


def draw_heat(
    axes: Axes,
    side: Axes,
    borders: Reals,
    values: Reals,
    colors: Colormap,
    limits: tuple[float, float],
) -> Colorbar:
    """Draw a row of cells for each of `values`, and return the scale of the colours beside it."""
    rows = np.arange(len(values) + 1) - 0.5
    mesh = axes.pcolormesh(
        borders, rows, np.ma.masked_invalid(values), cmap=colors, norm=Normalize(*limits),
        rasterized=True, zorder=1,
    )  # fmt: skip
    side.set_axis_on()
    bar = axes.figure.colorbar(mesh, cax=side, extend="neither")
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=INK, labelsize=8, length=2)
    return bar


def draw_crosses(axes: Axes, steps: Iterable[int], label: str) -> None:
    """Mark steps at the top of a panel where there is no number to draw."""
    at = list(steps)
    at = at[:: max(1, len(at) // _MOST_CROSSES)]
    if at:
        axes.plot(
            at, [0.93] * len(at), "x", color=ALARM, markersize=4.5, clip_on=False, label=label,
            transform=axes.get_xaxis_transform(), zorder=4,
        )  # fmt: skip
        set_legend(axes)


def draw_events(figure: Figure, panels: Sequence[Axes], events: Sequence[Event]) -> None:
    """Draw a line through all panels at each event, a number above it, and the texts below."""
    if not events:
        return
    for step in dict.fromkeys(event.step for event in events):
        for axes in (axes for axes in panels if axes.axison):
            axes.axvline(step, color=ALARM, linewidth=0.9, linestyle=(0, (4, 2)), zorder=3.5)
    left, right = panels[0].get_xlim()
    groups: list[list[int]] = []
    for number, event in enumerate(events, start=1):
        if groups and event.step - events[groups[-1][0] - 1].step <= (right - left) * _NEAR:
            groups[-1].append(number)
        else:
            groups.append([number])
    for first, *others in groups:
        panels[0].text(
            events[first - 1].step, 1.02, f"{first}-{others[-1]}" if others else f"{first}",
            transform=panels[0].get_xaxis_transform(), ha="center", va="bottom", fontsize=8,
            fontweight="bold", color="white", zorder=5,
            bbox={"boxstyle": "round,pad=0.25", "facecolor": ALARM, "edgecolor": "none"},
        )  # fmt: skip
    lines = [
        f"{number}  step {event.step}, {drawable(layer_label(event.layer))}: "
        f"{shorten(drawable(event.text), 110)}"
        for number, event in enumerate(events[:_MOST_EVENTS], start=1)
    ]
    if len(events) > _MOST_EVENTS:
        lines.append(f"and {len(events) - _MOST_EVENTS} more")
    text = "\n".join(lines)
    figure.supxlabel(text, x=0.01, ha="left", fontsize=8.5, color=ALARM, parse_math=False)


def sorted_events(events: Iterable[tuple[int, str, str]]) -> list[Event]:
    """Return events in the order of steps."""
    return sorted((Event(*event) for event in events), key=lambda event: event.step)
