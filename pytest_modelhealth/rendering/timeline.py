"""What figures of a training through time share: panels above each other, and marks in them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter
from matplotlib.transforms import blended_transform_factory

from pytest_modelhealth.rendering.figure import (
    ALARM,
    FAINT,
    INK,
    HealthFigure,
    drawable,
    set_style,
    set_subtitle,
    set_title,
)
from pytest_modelhealth.rendering.notation import shorten
from pytest_modelhealth.rendering.progress import headline, layer_label
from pytest_modelhealth.training.monitoring.history import History
from pytest_modelhealth.training.monitoring.row import Event

Reals = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

WIDTH = 11.0
"""Inches."""

MOST_EVENTS = 8
"""Events that are written out below a figure."""

_MOST_CROSSES = 60

_NEAR = 0.02
"""Events nearer to each other, as a part of the axis, share a number."""


def new_timeline(
    history: History, title: str, heights: Sequence[float]
) -> tuple[Figure, list[Axes], list[Axes]]:
    """Return a figure, its panels over the same steps, and a narrow place to the right of each."""
    figure = HealthFigure(
        figsize=(WIDTH, sum(heights) + 0.5 * len(heights) + 0.7),
        layout="constrained",
        facecolor="white",
    )
    grid = figure.add_gridspec(
        len(heights), 2, height_ratios=list(heights), width_ratios=[1.0, 0.014]
    )
    panels: list[Axes] = []
    for row in range(len(heights)):
        panels.append(
            figure.add_subplot(
                grid[row, 0], facecolor="white", sharex=panels[0] if panels else None
            )
        )
        set_style(panels[-1])
        panels[-1].tick_params(labelbottom=row == len(heights) - 1)
    sides = [figure.add_subplot(grid[row, 1]) for row in range(len(heights))]
    for side in sides:
        side.set_axis_off()
    edges = step_edges(history.steps)
    panels[0].set_xlim(edges[0], edges[-1])
    panels[-1].set_xlabel("step", color=INK, fontsize=9)
    panels[-1].xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    set_title(figure, title)
    return figure, panels, sides


def step_edges(steps: npt.NDArray[np.int64]) -> Reals:
    """Return where the cells of steps begin and end: half way to the next."""
    between = (steps[1:] + steps[:-1]) / 2
    first = between[0] - steps[0] if len(between) else 0.5
    last = steps[-1] - between[-1] if len(between) else 0.5
    return np.concatenate([[steps[0] - first], between, [steps[-1] + last]])


def draw_loss(axes: Axes, history: History) -> None:
    """Draw the loss over steps, on a log scale where it falls far, and crosses for NaN."""
    steps, loss = history.steps, history.loss
    is_usual = np.isfinite(loss)
    set_subtitle(axes, "loss")
    if not is_usual.any():
        axes.set_yticks([])
        axes.text(
            0.5, 0.45, "no finite loss was given to step_end()", transform=axes.transAxes,
            ha="center", color=INK, fontsize=9,
        )  # fmt: skip
    else:
        draw_line(axes, steps, np.clip(loss, -1e150, 1e150))
    bad = steps[np.isinf(loss) | (np.isnan(loss) & history_is_nan(history))]
    if len(bad):
        draw_crosses(axes, bad, "loss: NaN or inf")


def history_is_nan(history: History) -> Flags:
    """Return in which steps a missing loss is NaN rather than not given."""
    given = ~np.isnan(history.loss)
    return np.full(len(history), bool(given.any())) & ~given


def draw_line(axes: Axes, steps: npt.NDArray[np.int64], values: Reals, **look: Any) -> None:
    """Draw a line over steps, on a log scale where its values reach over two decades."""
    usual = values[np.isfinite(values)]
    positive = usual[usual > 0]
    if len(positive) and len(positive) == len(usual) and positive.max() > 100 * positive.min():
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    alone = "o" if len(usual) == 1 else None
    given: dict[str, Any] = {
        "color": INK,
        "linewidth": 1.2,
        "marker": alone,
        "markersize": 3,
    } | look
    axes.plot(steps, np.where(np.isfinite(values), values, np.nan), **given)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)


def draw_crosses(axes: Axes, steps: Iterable[int], label: str) -> None:
    """Mark steps at the top of a panel where there is no number to draw."""
    at = list(steps)
    at = at[:: max(1, len(at) // _MOST_CROSSES)]
    place = blended_transform_factory(axes.transData, axes.transAxes)
    axes.plot(
        at, [0.93] * len(at), "x", color=ALARM, markersize=4.5, transform=place,
        clip_on=False, label=label, zorder=4,
    )  # fmt: skip
    axes.legend(
        loc="lower right", bbox_to_anchor=(1, 0.97), frameon=False, fontsize=8, labelcolor=INK,
        borderaxespad=0.2,
    )  # fmt: skip


def draw_events(figure: Figure, panels: Sequence[Axes], events: Sequence[Event]) -> None:
    """Draw a line through all panels at each event, a number above it, and the texts below."""
    if not events:
        return
    left, right = panels[0].get_xlim()
    place = blended_transform_factory(panels[0].transData, panels[0].transAxes)
    for step in dict.fromkeys(event.step for event in events):
        for axes in (axes for axes in panels if axes.axison):
            axes.axvline(step, color=ALARM, linewidth=0.9, linestyle=(0, (4, 2)), zorder=3.5)
    for group in _near_each_other(events, (right - left) * _NEAR):
        first, last = group[0] + 1, group[-1] + 1
        panels[0].text(
            events[group[0]].step, 1.02, f"{first}" if first == last else f"{first}-{last}",
            transform=place, ha="center", va="bottom", fontsize=8, fontweight="bold",
            color="white", zorder=5,
            bbox={"boxstyle": "round,pad=0.25", "facecolor": ALARM, "edgecolor": "none"},
        )  # fmt: skip
    figure.supxlabel(_texts(events), x=0.01, ha="left", fontsize=8.5, color=ALARM, parse_math=False)


def _near_each_other(events: Sequence[Event], distance: float) -> list[list[int]]:
    groups: list[list[int]] = []
    for index, event in enumerate(events):
        if groups and event.step - events[groups[-1][0]].step <= distance:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def _texts(events: Sequence[Event]) -> str:
    lines = [
        f"{number}  step {event.step}, {drawable(layer_label(event.layer))}: "
        f"{shorten(drawable(event.text), 110)}"
        for number, event in enumerate(events[:MOST_EVENTS], start=1)
    ]
    if len(events) > MOST_EVENTS:
        lines.append(f"and {len(events) - MOST_EVENTS} more")
    return "\n".join(lines)


def sorted_events(events: Iterable[tuple[int, str, str]]) -> list[Event]:
    """Return events in the order of steps."""
    return sorted((Event(*event) for event in events), key=lambda event: event.step)


def subtitle(history: History, worst: Event | None = None) -> str:
    """Return the headline without the model's name, in lines that fit a figure."""
    text = headline(history, worst).partition(": ")[2]
    return "\n".join(textwrap.wrap(drawable(text), 150))
