"""A training in one picture: the loss, and below it all layers through time."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from pytest_modelhealth.rendering.figure import ALARM, INK, drawable
from pytest_modelhealth.rendering.notation import abbreviate, number, plural, shorten
from pytest_modelhealth.rendering.progress import BAND, MOST_DEAD, headline, layer_label, shown
from pytest_modelhealth.rendering.timeline import (
    FAINT,
    MISSING,
    NAME_WIDTH,
    USUAL,
    Flags,
    Reals,
    draw_crosses,
    draw_events,
    draw_heat,
    new_timeline,
    set_legend,
    set_subtitle,
    sorted_events,
    step_edges,
)
from pytest_modelhealth.training.monitoring.history import History
from pytest_modelhealth.training.monitoring.row import Event

MOST_ROWS = 120
"""Rows of a heat map; of more layers, those of a container are put together."""

MOST_COLUMNS = 800
"""Columns of a heat map; of more steps, neighbours are put together."""

NONFINITE, ZERO = "#ff00a8", "#000000"

_ROW, _NAME = 0.17, 0.145
"""Inches of a row, and of the name of one."""

_LEAST, _MOST = 0.6, 3.6
"""Inches of a heat map."""

_DECADES = 12


def plot_training(
    history: History, events: Iterable[tuple[int, str, str]] = (), worst: Event | None = None
) -> Figure:
    """Return a figure of a training: the loss, gradient norms, dead units and update ratios.

    Layers stand in execution order. A layer that holds others has a row only where it owns
    parameters. Where rows or columns are put together, the worst of them is shown: what is not
    finite first, then what is farthest from the rest.

    Args:
        history: the watched steps; there is at least one.
        events: what went wrong, each a step, a layer and a text: a line through all panels, a ring
            in the row of the layer, the text below.
        worst: the gravest of them, for the line at the top; ``None`` looks at the latest step.
    """
    listed = sorted_events(events)
    maps = [_fold(each) for each in (_gradients(history), _dead(history), _updates(history))]
    drawn = [each for each in maps if each.names or not each.is_log]
    heights = [1.1]
    heights += [min(_MOST, max(_LEAST, _ROW * len(m.names))) if m.names else 0.1 for m in drawn]
    name = shorten(drawable(history.model_type), NAME_WIDTH)
    figure, panels, sides = new_timeline(history, f"training of {name}", heights)
    _draw_loss(panels[0], history)
    said = drawable(headline(history, worst).partition(": ")[2])
    set_subtitle(panels[0], "\n".join([*textwrap.wrap(said, 150), "", "loss"]))
    edges = step_edges(history.steps)
    for axes, side, each, height in zip(panels[1:], sides[1:], drawn, heights[1:], strict=True):
        if not each.names:
            set_subtitle(axes, each.title)
            axes.set_axis_off()
            continue
        _draw(axes, side, each, edges)
        _name_rows(axes, each, height, {event.layer for event in listed})
        _ring(axes, each, listed)
    every = max((each.every for each in drawn), default=1)
    if every > 1:
        panels[-1].set_xlabel(f"step; a column is {every} watched steps, the worst shown")
    draw_events(figure, panels, listed)
    return figure


def _draw_loss(axes: Axes, history: History) -> None:
    """Draw the loss over steps, on a log scale where it falls far, and crosses for NaN."""
    steps, loss = history.steps, history.loss
    usual = loss[np.isfinite(loss)]
    if not len(usual):
        axes.set_yticks([])
        axes.text(
            0.5, 0.45, "no finite loss was given to step_end()", transform=axes.transAxes,
            ha="center", color=INK, fontsize=9,
        )  # fmt: skip
    else:
        if usual.min() > 0 and usual.max() > 100 * usual.min():
            axes.set_yscale("log")
            axes.yaxis.set_minor_formatter(NullFormatter())
        line = np.where(np.isfinite(loss), np.clip(loss, -1e150, 1e150), np.nan)
        alone = "o" if len(usual) == 1 else None
        axes.plot(steps, line, color=INK, linewidth=1.2, marker=alone, markersize=3)
        axes.grid(axis="y", color=FAINT, linewidth=0.6)
    was_given = not np.isnan(loss).all()  # else a missing one is none that was NaN
    draw_crosses(axes, steps[np.isinf(loss) | (np.isnan(loss) & was_given)], "loss: NaN or inf")


@dataclass(frozen=True)
class _Map:
    """A heat map.

    Args:
        title: what it is of.
        names: of its rows, as they are drawn.
        members: the layers in each row.
        values: shape ``(rows, columns)``; NaN where nothing was seen.
        bad: where something was not finite.
        badness: how far a value is from what is usual.
        colors: of the values.
        limits: values of the first and the last colour.
        is_log: whether the colours are on a log scale, and zero has its own.
        band: values between which all is usual.
        every: how many steps are in a column.
    """

    title: str
    names: tuple[str, ...]
    members: tuple[tuple[str, ...], ...]
    values: Reals
    bad: Flags
    badness: Reals
    colors: Colormap
    limits: tuple[float, float]
    is_log: bool
    band: tuple[float, float] | None = None
    every: int = 1


def _map(history: History, title: str, values: Reals, bad: Flags, rows: Flags, **rest: Any) -> _Map:
    """Return the heat map of those layers that have something to show."""
    at = _in_order(history)
    at = at[(rows & (np.isfinite(values) | bad).any(axis=0))[at]]
    chosen = [history.layers[place] for place in at]
    values = np.where(np.isinf(values), np.nan, values)[:, at].T
    return _Map(
        title=title,
        names=tuple(layer_label(layer) for layer in chosen),
        members=tuple((layer,) for layer in chosen),
        values=values,
        bad=bad[:, at].T,
        badness=_badness(values, is_log=rest["is_log"]),
        **rest,
    )


def _in_order(history: History) -> npt.NDArray[np.int64]:
    """Return the places of the layers in execution order.

    A layer whose parameters are used without a call of it stands after the last one that was
    called of those beside it.
    """
    layers = history.layers
    called: Flags = np.any(np.isfinite(history["activation_mean"]), axis=0)
    beside: dict[str, int] = {}
    for place in np.flatnonzero(called):
        parent = layers[place]
        beside.setdefault(parent, int(place))
        while parent:
            parent = parent.rpartition(".")[0]
            beside[parent] = int(place)
    parents = [layer.rpartition(".")[0] for layer in layers]
    after = [
        place if called[place] or not parents[place] else beside.get(parents[place], len(layers))
        for place in range(len(layers))
    ]
    return np.lexsort(np.array([np.arange(len(layers)), ~called, after]))


def _badness(values: Reals, *, is_log: bool) -> Reals:
    if is_log:
        with np.errstate(divide="ignore"):
            powers = np.log10(values)
        usual = powers[np.isfinite(powers)]
        values = np.abs(powers - (np.median(usual) if len(usual) else 0.0))
    return np.where(np.isnan(values), -1.0, values)


def _gradients(history: History) -> _Map:
    kind = "parameter_gradient"
    of = "parameters"
    if not np.isfinite(history[f"{kind}_norm"]).any():
        kind, of = "gradient", "activations"
    values = history[f"{kind}_norm"]
    bad = (history[f"{kind}_nonfinite"] > 0) | np.isinf(values)
    usual = values[np.isfinite(values) & (values > 0)]
    powers = np.log10(usual) if len(usual) else np.zeros(1)
    middle = float(np.median(powers))
    low = max(float(powers.min()), middle - _DECADES / 2)
    high = min(float(powers.max()), middle + _DECADES / 2)
    if high - low < 1:
        low, high = (low + high - 1) / 2, (low + high + 1) / 2
    return _map(
        history, f"gradient norm of {of}", values, bad, shown(history),
        colors=_GRADIENTS, limits=(10**low, 10**high), is_log=True,
    )  # fmt: skip


def _dead(history: History) -> _Map:
    values = history["dead_fraction"]
    bad = (history["activation_nonfinite"] > 0) & np.isfinite(values)
    rows = shown(history) & np.isfinite(values).any(axis=0)
    ever = rows & ((values > 0) | bad).any(axis=0)
    none = int(rows.sum() - ever.sum())
    title = "dead units, part of all"
    if none:
        title += f" ({plural(none, 'further layer' if ever.any() else 'layer')} never had one)"
    return _map(
        history, title, values, bad, ever, colors=_DEAD, limits=(0.0, 1.0), is_log=False
    )  # fmt: skip


def _updates(history: History) -> _Map:
    values = history["update_ratio"]
    after = history["parameter_nonfinite"] > 0
    following = np.concatenate([after[1:], history["parameter_gradient_nonfinite"][-1:] > 0])
    bad = after | np.isinf(values) | (np.isnan(values) & following)
    return _map(
        history, "update ratio: norm of what a step changes by norm of the weights", values, bad,
        shown(history), colors=_UPDATES, limits=(1e-6, 1.0), is_log=True, band=BAND,
    )  # fmt: skip


def _colors(name: str, *stops: tuple[float, str]) -> Colormap:
    made = LinearSegmentedColormap.from_list(name, list(stops), N=256)
    return made.with_extremes(bad=MISSING, under=ZERO, over=NONFINITE)


_GRADIENTS = _colors(
    "gradients", (0, "#3b2a6b"), (0.25, "#33628d"), (0.5, "#21918c"), (0.75, "#7ad151"),
    (1, "#fde725"),
)  # fmt: skip
_DEAD = _colors("dead", (0, "#eef6ef"), (0.5, "#f3b35c"), (0.85, "#b3400f"), (1, "#3d1004"))
_UPDATES = _colors(
    "updates", (0, "#123a6f"), (0.333, "#a9c9e8"), (0.3331, "#dff0d8"), (0.666, "#dff0d8"),
    (0.6661, "#fbc28b"), (1, "#8c2d04"),
)  # fmt: skip


# Folding: no row or column is lost, whatever the size of the figure.


def _fold(given: _Map) -> _Map:
    """Return the heat map with so few rows and columns that each can be seen."""
    keys = _row_keys([names[0] for names in given.members])
    groups = [list(group) for _, group in groupby(range(len(keys)), key=lambda row: keys[row])]
    columns = given.values.shape[1]
    every = math.ceil(columns / MOST_COLUMNS)
    spans = [list(range(start, min(start + every, columns))) for start in range(0, columns, every)]
    if len(groups) == len(keys) and every == 1:
        return given
    values = np.full((len(groups), len(spans)), np.nan)
    bad = np.zeros(values.shape, dtype=bool)
    badness = np.full(values.shape, -1.0)
    for row, group in enumerate(groups):
        for column, span in enumerate(spans):
            block = np.ix_(group, span)
            worst = np.argmax(given.badness[block])
            values[row, column] = given.values[block].flat[worst]
            badness[row, column] = given.badness[block].flat[worst]
            bad[row, column] = given.bad[block].any()
    names = (
        given.names[first]
        if not others
        else f"{layer_label(keys[first])} ({plural(1 + len(others), 'layer')})"
        for first, *others in groups
    )
    return replace(
        given,
        names=tuple(names),
        members=tuple(tuple(given.members[row][0] for row in group) for group in groups),
        values=values, bad=bad, badness=badness, every=every,
    )  # fmt: skip


def _row_keys(layers: Sequence[str]) -> list[str]:
    """Return the row each layer belongs to: itself, or a container where there are too many."""
    keys = list(layers)
    depth = max((layer.count(".") for layer in layers), default=0)
    while len(list(groupby(keys))) > MOST_ROWS and depth:
        keys = [".".join(layer.split(".")[:depth]) for layer in layers]
        depth -= 1
    many = math.ceil(len(list(groupby(keys))) / MOST_ROWS)
    if many > 1:
        keys = [layers[row - row % many] for row in range(len(layers))]
    return keys


# Drawing.


def _draw(axes: Axes, side: Axes, each: _Map, edges: Reals) -> None:
    low, high = each.limits
    values = each.values
    if each.is_log:
        with np.errstate(divide="ignore"):
            values = np.where(values == 0, -np.inf, np.log10(np.clip(values, low, high)))
        low, high = math.log10(low), math.log10(high)
    beyond = high - low + 1
    coded = np.where(np.isneginf(values), low - beyond, values)
    coded = np.where(each.bad, high + beyond, coded)
    borders = np.append(edges[:-1][:: each.every], edges[-1])
    bar = draw_heat(axes, side, borders, coded, each.colors, (low, high))
    axes.set_ylim(len(each.names) - 0.5, -0.5)
    set_subtitle(axes, each.title)
    _key(axes, each)
    bar.formatter = FuncFormatter(lambda part, _: f"{part:.0%}")
    if each.is_log:
        bar.locator = MaxNLocator(nbins=6, steps=[1, 2, 5, 10])
        bar.formatter = FuncFormatter(
            lambda power, _: f"1e{power:.0f}" if power == round(power) else number(10.0**power)
        )
    for limit in each.band or ():
        bar.ax.axhline(math.log10(limit), color=INK, linewidth=1.2)


def _key(axes: Axes, each: _Map) -> None:
    """Say what the colours mean that are not on the scale, of those that occur."""
    is_missing, is_zero = np.isnan(each.values) & ~each.bad, (each.values == 0) & ~each.bad
    found = {
        "not finite": (NONFINITE, each.bad.any()),
        "zero": (ZERO, each.is_log and is_zero.any()),
        "not seen": (MISSING, is_missing.any()),
    }
    if each.band:
        low, high = each.band
        found[f"usual: {low:.0e} to {high:.0e}".replace("e-0", "e-")] = (USUAL, True)
    patches = [
        Patch(facecolor=color, edgecolor=INK, linewidth=0.4, label=name)
        for name, (color, occurs) in found.items()
        if occurs
    ]
    if patches:
        look = {"bbox_to_anchor": (1, 1.0), "borderaxespad": 0.1, "ncols": len(patches)}
        set_legend(axes, handles=patches, handlelength=1.2, columnspacing=1.2, **look)


def _name_rows(axes: Axes, each: _Map, height: float, marked: set[str]) -> None:
    """Name as many rows as there is room for, and of neighbours the one that went wrong."""
    rows = len(each.names)
    wrong = each.bad.any(axis=1) | (each.values == 0).any(axis=1) & each.is_log
    if not each.is_log:
        wrong |= np.nan_to_num(each.values).max(axis=1, initial=0) > MOST_DEAD
    is_marked = [bool(marked.intersection(members)) for members in each.members]
    step = max(1, math.ceil(rows * _NAME / height))
    groups = [range(start, min(start + step, rows)) for start in range(0, rows, step)]
    named = [max(group, key=lambda row: (is_marked[row], bool(wrong[row]))) for group in groups]
    after = [*named[1:], named[-1] + rows]  # a name near the next one would overlap it
    named = [row for row, other in zip(named, after, strict=True) if other - row >= step // 2]
    names = [abbreviate(drawable(each.names[row]), NAME_WIDTH) for row in named]
    axes.set_yticks(named, labels=names, parse_math=False, fontsize=7.5)
    for row, label in zip(named, axes.get_yticklabels(), strict=True):
        label.set_color(ALARM if is_marked[row] or wrong[row] else INK)


def _ring(axes: Axes, each: _Map, events: Sequence[Event]) -> None:
    """Draw a ring at the step and the row of each event."""
    at = [
        (event.step, row)
        for event in events
        for row, members in enumerate(each.members)
        if event.layer in members
    ]
    for color, width in (("white", 3.2), (ALARM, 1.6)) if at else ():
        axes.plot(
            *zip(*at, strict=True), "o", markerfacecolor="none", markeredgecolor=color,
            markeredgewidth=width, markersize=8, clip_on=False, zorder=4,
        )  # fmt: skip
