"""A training as figures of matplotlib: all layers through time, or one layer.

On a page each of some 100,000 cells would be an element, so heat maps are drawn here alone.
"""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colorbar import Colorbar
from matplotlib.colors import Colormap, LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from pytest_modelhealth.rendering.figures import ALARM, INK, HealthFigure, drawable
from pytest_modelhealth.rendering.notation import (
    abbreviate,
    number,
    plural,
    power_of_two,
    shorten,
)
from pytest_modelhealth.rendering.progress import (
    BAND,
    MOST_DEAD,
    headline,
    layer_label,
    nonfinite,
    remarks,
    shown,
)
from pytest_modelhealth.training.monitoring.history import History
from pytest_modelhealth.training.monitoring.row import BINNED, EDGES, Event

Reals = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

MOST_ROWS, MOST_COLUMNS = 120, 800
"""Of a heat map; of more layers or steps, neighbours share a row or a column."""

FAINT, MISSING, USUAL, NONFINITE, ZERO = "#dfe3e8", "#c9ccd1", "#dff0d8", "#ff00a8", "#000000"
_ACTIVATIONS, _PARAMETERS, _ZEROS = "#4c78a8", "#e08214", "#8a8f98"

_WIDTH, _LINES, _HISTOGRAM, _ROW, _NAME = 11.0, 1.15, 2.0, 0.17, 0.145
"""Inches: a figure, a panel of lines and one of histograms, a row of a heat map, a row's name."""

_LEAST, _MOST = 0.6, 3.6
"""Inches of a heat map."""

_NAME_WIDTH = 36
"""Characters of a name."""

_MOST_EVENTS, _MOST_CROSSES = 8, 60

_LARGEST = 1e150
"""What is larger is drawn as this: matplotlib squares values."""


# What both figures share.


def _timeline(
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
        axes.tick_params(colors=INK, labelsize=8.5, length=3, labelbottom=axes is panels[-1])
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(INK)
        if axes is not panels[0]:
            axes.sharex(panels[0])
    edges = _step_edges(history)
    panels[0].set_xlim(edges[0], edges[-1])
    panels[0].xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    panels[-1].set_xlabel("step", color=INK, fontsize=9)
    figure.suptitle(
        title, x=0.01, ha="left", fontsize=11.5, fontweight="bold", color=INK, parse_math=False
    )
    return figure, panels, sides


def _set_title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=9, color=INK, parse_math=False)


def _set_legend(axes: Axes, **look: object) -> None:
    """Name what is drawn, at the right above a panel."""
    look = {"bbox_to_anchor": (1, 0.97), "ncols": 4, "borderaxespad": 0.2} | look
    axes.legend(loc="lower right", frameon=False, fontsize=8, labelcolor=INK, **look)


def _step_edges(history: History) -> Reals:
    """Return where the cells of steps begin and end: half way to the next."""
    steps = history.steps
    between = (steps[1:] + steps[:-1]) / 2
    first = between[0] - steps[0] if len(between) else 0.5
    last = steps[-1] - between[-1] if len(between) else 0.5
    return np.concatenate([[steps[0] - first], between, [steps[-1] + last]])


def _draw_heat(
    axes: Axes,
    side: Axes,
    borders: Reals,
    values: Reals,
    colors: Colormap,
    limits: tuple[float, float],
) -> Colorbar:
    """Draw a row of cells for each of `values`, and return the scale of the colours beside it."""
    mesh = axes.pcolormesh(
        borders, np.arange(len(values) + 1) - 0.5, np.ma.masked_invalid(values), cmap=colors,
        norm=Normalize(*limits), rasterized=True, zorder=1,
    )  # fmt: skip
    side.set_axis_on()
    bar = axes.figure.colorbar(mesh, cax=side, extend="neither")
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=INK, labelsize=8, length=2)
    return bar


def _draw_crosses(axes: Axes, steps: npt.NDArray[np.int64], label: str) -> None:
    """Mark steps at the top of a panel where there is no number to draw."""
    at = steps[:: max(1, len(steps) // _MOST_CROSSES)]
    if len(at):
        axes.plot(
            at, [0.93] * len(at), "x", color=ALARM, markersize=4.5, clip_on=False, label=label,
            transform=axes.get_xaxis_transform(), zorder=4,
        )  # fmt: skip
        _set_legend(axes)


def _set_log(axes: Axes) -> None:
    """Draw a panel on a log scale; a line falls out of it at a zero."""
    axes.set_yscale("log", nonpositive="clip")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_events(figure: Figure, panels: Sequence[Axes], events: Sequence[Event]) -> None:
    """Draw a line through all panels at each event, a number above it, and the texts below."""
    left, right = panels[0].get_xlim()
    groups: list[list[int]] = []
    for at, event in enumerate(events):
        # those nearer to each other than 2 % of the axis share a number
        if groups and event.step - events[groups[-1][0]].step <= (right - left) * 0.02:
            groups[-1].append(at)
        else:
            groups.append([at])
        for axes in panels:
            axes.axvline(event.step, color=ALARM, linewidth=0.9, linestyle=(0, (4, 2)), zorder=3.5)
    for first, *others in groups:
        panels[0].text(
            events[first].step, 1.02, f"{first + 1}-{others[-1] + 1}" if others else f"{first + 1}",
            transform=panels[0].get_xaxis_transform(), ha="center", va="bottom", fontsize=8,
            fontweight="bold", color="white", zorder=5,
            bbox={"boxstyle": "round,pad=0.25", "facecolor": ALARM, "edgecolor": "none"},
        )  # fmt: skip
    lines = [
        f"{at}  step {event.step}, {drawable(layer_label(event.layer))}: "
        f"{shorten(drawable(event.text), 110)}"
        for at, event in enumerate(events[:_MOST_EVENTS], start=1)
    ]
    lines += [f"and {len(events) - _MOST_EVENTS} more"] * (len(events) > _MOST_EVENTS)
    if lines:
        text = "\n".join(lines)
        figure.supxlabel(text, x=0.01, ha="left", fontsize=8.5, color=ALARM, parse_math=False)


# All layers.


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
    listed = sorted(itertools.starmap(Event, events), key=lambda event: event.step)
    maps = [_gradients(history), _dead(history), _updates(history)]
    drawn = [_fold(each) for each in maps if each.members or not each.is_log]
    heights = [1.1]
    heights += [min(_MOST, max(_LEAST, _ROW * len(m.members))) if m.members else 0.1 for m in drawn]
    name = shorten(drawable(history.model_type), _NAME_WIDTH)
    figure, panels, sides = _timeline(history, f"training of {name}", heights)
    _draw_loss(panels[0], history)
    said = drawable(headline(history, worst).partition(": ")[2])
    _set_title(panels[0], "\n".join([*textwrap.wrap(said, 150), "", "loss"]))
    for axes, side, each, height in zip(panels[1:], sides[1:], drawn, heights[1:], strict=True):
        _set_title(axes, each.title)
        if each.members:
            _draw_map(axes, side, each, _step_edges(history))
            _name_rows(axes, each, height, listed)
        else:
            axes.set_axis_off()
    every = max((each.every for each in drawn), default=1)
    if every > 1:
        panels[-1].set_xlabel(f"step; a column is {every} watched steps, the worst shown")
    _draw_events(figure, [axes for axes in panels if axes.axison], listed)
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
            _set_log(axes)
        alone = "o" if len(usual) == 1 else None
        axes.plot(steps, _finite(loss), color=INK, linewidth=1.2, marker=alone, markersize=3)
        axes.grid(axis="y", color=FAINT, linewidth=0.6)
    was_given = not np.isnan(loss).all()  # else a missing one is none that was NaN
    _draw_crosses(axes, steps[np.isinf(loss) | (np.isnan(loss) & was_given)], "loss: NaN or inf")


def _finite(values: Reals) -> Reals:
    """Return values that matplotlib can draw, NaN where there is no number."""
    return np.where(np.isfinite(values), np.clip(values, -_LARGEST, _LARGEST), np.nan)


@dataclass(frozen=True)
class _Map:
    """A heat map.

    Args:
        title: what it is of.
        members: the layers in each row.
        values: shape ``(rows, columns)``; NaN where nothing was seen, infinity where something was
            not finite.
        colors: of the values.
        limits: values of the first and the last colour.
        is_log: whether the colours are on a log scale, and zero has its own.
        band: values between which all is usual.
        every: how many steps are in a column.
    """

    title: str
    members: Sequence[Sequence[str]]
    values: Reals
    colors: Colormap
    limits: tuple[float, float]
    is_log: bool = True
    band: tuple[float, float] | None = None
    every: int = 1

    @property
    def names(self) -> list[str]:
        """Of the rows, as they are drawn."""
        return [
            layer_label(first) + f" and {plural(len(others), 'more layer')}" * bool(others)
            for first, *others in self.members
        ]


def _map(
    history: History, title: str, values: Reals, bad: Flags, *look: Any, rows: Flags | None = None
) -> _Map:
    """Return the heat map of those layers, of `rows`, that have something to show."""
    values = np.where(bad | np.isinf(values), np.inf, values)
    rows = shown(history) if rows is None else rows
    at = np.flatnonzero(rows & ~np.isnan(values).all(axis=0))
    return _Map(title, [[history.layers[place]] for place in at], values[:, at].T, *look)


def _gradients(history: History) -> _Map:
    kind, of = "parameter_gradient", "parameters"
    if not np.isfinite(history[f"{kind}_norm"]).any():
        kind, of = "gradient", "activations"
    values = history[f"{kind}_norm"]
    powers = np.log10(values[np.isfinite(values) & (values > 0)])
    powers = powers if len(powers) else np.zeros(1)
    middle = np.median(powers)  # at most six powers of ten to both sides of it have a colour
    low, high = np.clip([powers.min(), powers.max()], middle - 6, middle + 6).tolist()
    if high - low < 1:
        low, high = (low + high - 1) / 2, (low + high + 1) / 2
    bad, limits = history[f"{kind}_nonfinite"] > 0, (10**low, 10**high)
    return _map(history, f"gradient norm of {of}", values, bad, _GRADIENTS, limits)


def _dead(history: History) -> _Map:
    values = history["dead_fraction"]
    is_seen = np.isfinite(values)
    bad = (history["activation_nonfinite"] > 0) & is_seen
    rows = shown(history) & is_seen.any(axis=0)
    ever = rows & ((values > 0) | bad).any(axis=0)
    title, none = "dead units, part of all", int(rows.sum() - ever.sum())
    if none:
        title += f" ({plural(none, 'further layer' if ever.any() else 'layer')} never had one)"
    return _map(history, title, values, bad, _DEAD, (0.0, 1.0), False, rows=ever)


def _updates(history: History) -> _Map:
    values = history["update_ratio"]
    after = history["parameter_nonfinite"] > 0
    following = np.concatenate([after[1:], history["parameter_gradient_nonfinite"][-1:] > 0])
    title = "update ratio: norm of what a step changes by norm of the weights"
    bad = after | (np.isnan(values) & following)
    return _map(history, title, values, bad, _UPDATES, (1e-6, 1.0), True, BAND)


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


def _fold(given: _Map) -> _Map:
    """Return the heat map with so few rows and columns that each can be seen; none is lost."""
    (rows, columns), far = given.values.shape, _distances(given)
    down, across = max(1, math.ceil(rows / MOST_ROWS)), math.ceil(columns / MOST_COLUMNS)
    blocks = [
        [np.s_[row : row + down, at : at + across] for at in range(0, columns, across)]
        for row in range(0, rows, down)
    ]
    values = np.array([[given.values[b].flat[far[b].argmax()] for b in row] for row in blocks])
    members = [
        [layer for group in given.members[row : row + down] for layer in group]
        for row in range(0, rows, down)
    ]
    return replace(given, members=members, values=values, every=across)


def _distances(given: _Map) -> Reals:
    """Return how far each cell is from what is usual: what is not finite furthest."""
    values = given.values
    with np.errstate(divide="ignore"):
        scaled = np.log10(values) if given.is_log else values
    usual = scaled[np.isfinite(scaled)]
    middle = np.median(usual) if len(usual) and given.is_log else 0.0
    far = np.minimum(np.abs(scaled - middle), 1e9)  # a zero, too
    return np.where(np.isnan(values), -1.0, np.where(np.isinf(values), np.inf, far))


def _draw_map(axes: Axes, side: Axes, each: _Map, edges: Reals) -> None:
    low, high = each.limits
    values = np.where(np.isinf(each.values), np.nan, np.clip(each.values, low, high))
    if each.is_log:
        low, high, values = math.log10(low), math.log10(high), np.log10(values)
        values[each.values == 0] = low - 1  # below and above the limits have their own colours
    values[np.isinf(each.values)] = high + 1
    borders = np.append(edges[:-1][:: each.every], edges[-1])
    bar = _draw_heat(axes, side, borders, values, each.colors, (low, high))
    axes.set_ylim(len(each.members) - 0.5, -0.5)
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
    patches = [
        Patch(facecolor=color, edgecolor=INK, linewidth=0.4, label=name)
        for name, color, occurs in (
            ("not finite", NONFINITE, np.isinf(each.values).any()),
            ("zero", ZERO, each.is_log and (each.values == 0).any()),
            ("not seen", MISSING, np.isnan(each.values).any()),
            ("usual: 1e-4 to 1e-2", USUAL, each.band is not None),
        )
        if occurs
    ]
    if patches:
        look = {"bbox_to_anchor": (1, 1.0), "borderaxespad": 0.1, "ncols": len(patches)}
        _set_legend(axes, handles=patches, handlelength=1.2, columnspacing=1.2, **look)


def _name_rows(axes: Axes, each: _Map, height: float, events: Sequence[Event]) -> None:
    """Name as many rows as there is room for, those first that went wrong, and ring the events."""
    rows, worst = len(each.members), np.nan_to_num(each.values, nan=0.0, posinf=np.inf)
    is_wrong: Any = np.isinf(worst).any(axis=1)
    is_wrong |= ((each.values == 0) if each.is_log else worst > MOST_DEAD).any(axis=1)
    rings = [
        (event.step, row)
        for event in events
        for row, members in enumerate(each.members)
        if event.layer in members
    ]
    is_wrong[[row for _, row in rings]] = True
    step = max(1, math.ceil(rows * _NAME / height))
    named: list[int] = []
    for row in sorted(range(rows), key=lambda row: (not is_wrong[row], row % step, row)):
        if all(abs(row - other) >= step for other in named):
            named.append(row)
    labels = each.names
    names = [abbreviate(drawable(labels[row]), _NAME_WIDTH) for row in named]
    axes.set_yticks(named, labels=names, parse_math=False, fontsize=7.5)
    for row, label in zip(named, axes.get_yticklabels(), strict=True):
        label.set_color(ALARM if is_wrong[row] else INK)
    if rings:
        axes.plot(
            *zip(*rings, strict=True), "o", markerfacecolor="none", markeredgecolor=ALARM,
            markeredgewidth=1.6, markersize=8, clip_on=False, zorder=4,
        )  # fmt: skip


# One layer.


_MEAN = "activations: mean, and a standard deviation to both sides"
_PARTS = "dead units and zeros, part of all"
_UPDATE = "update ratio"
_PANELS = {
    _MEAN: {"activation_mean": ("mean", INK), "activation_std": ("std", _ACTIVATIONS)},
    "activations: scale": {
        "activation_abs_max": ("largest magnitude", INK),
        "activation_std": ("standard deviation", _ACTIVATIONS),
    },
    _PARTS: {"dead_fraction": ("dead units", INK), "zero_fraction": ("zeros", _ZEROS)},
    "gradient norm": {
        "gradient_norm": ("activations", _ACTIVATIONS),
        "parameter_gradient_norm": ("parameters", _PARAMETERS),
    },
    _UPDATE: {"update_ratio": ("update ratio", INK)},
}

_WIDE = 30
"""Values that reach over a larger factor are drawn on a log scale."""

_SMALLEST = -4
"""Power of ten of the smallest part of the values that has a colour."""

_BINS = colormaps["YlGnBu"].with_extremes(bad=MISSING, under="white")
"""Of bins; an empty one is white, and grey where there is nothing finite."""


def plot_layer(history: History, layer: str, events: Iterable[tuple[int, str, str]] = ()) -> Figure:
    """Return a figure of one layer through time; only panels that have something to show.

    Histograms, where they were kept, are columns of a heat map: the part of the values by sign and
    power of four, on a log scale.

    Args:
        history: the watched steps; there is at least one.
        layer: the layer's name.
        events: what went wrong, each a step, a layer and a text; those of this layer are marked.

    Raises:
        LayerNotFoundError: there is no such layer.
    """
    lines = {name: _finite(history[layer, name]) for panel in _PANELS.values() for name in panel}
    is_bad = nonfinite(history)[:, history.layers.index(layer)]
    for name, values in lines.items():
        if name in _PANELS[_PARTS]:
            values[history[layer, "activation_nonfinite"] > 0] = math.nan
            values[:] = values if (values > 0).any() else math.nan
        elif name != "update_ratio":
            values[is_bad & (values == 0)] = math.nan  # of no finite value
    drawn = {
        panel: kept
        for panel, names in _PANELS.items()
        if (kept := {name: lines[name] for name in names if np.isfinite(lines[name]).any()})
    }
    roles = BINNED if history.has_histograms else ()
    kept_bins = {role: history.histograms(layer, role).astype(float) for role in roles}
    spread = {role: seen for role, seen in kept_bins.items() if np.isfinite(seen).any()}
    heights = [_LINES] * len(drawn) + [_HISTOGRAM] * len(spread)
    name = shorten(drawable(history.model_type), _NAME_WIDTH)
    title = f"{drawable(layer_label(layer))} in the training of {name}"
    figure, panels, sides = _timeline(history, title, heights or [_LINES])
    for axes, (panel, values_of) in zip(panels, drawn.items(), strict=False):
        _draw_lines(axes, history.steps, panel, values_of)
    rest = slice(len(drawn), None)
    for axes, side, (role, bins) in zip(panels[rest], sides[rest], spread.items(), strict=False):
        _draw_histograms(axes, side, history, role, bins)
    if not heights:
        _set_title(panels[0], "nothing finite was seen of this layer")
        panels[0].set_yticks([])
    _draw_crosses(panels[0], history.steps[is_bad], "not finite")
    if said := [f"{r.text} since step {r.since}" for r in remarks(history) if r.layer == layer]:
        _set_title(panels[0], f"{said[0]}\n\n{panels[0].get_title(loc='left')}")
    own = [event for event in itertools.starmap(Event, events) if event.layer == layer]
    _draw_events(figure, panels, sorted(own, key=lambda event: event.step))
    return figure


def _draw_lines(
    axes: Axes, steps: npt.NDArray[np.int64], panel: str, lines: dict[str, Reals]
) -> None:
    _set_title(axes, panel)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    if panel == _MEAN:
        mean, std = lines.get("activation_mean"), lines.get("activation_std")
        if mean is not None and std is not None:
            axes.fill_between(
                steps, mean - std, mean + std, color=_ACTIVATIONS, alpha=0.25, linewidth=0
            )
        lines = {} if mean is None else {"activation_mean": mean}
    for name, values in lines.items():
        label, color = _PANELS[panel][name]
        axes.plot(steps, values, color=color, linewidth=1.2, label=label)
    if panel == _PARTS:
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda part, _: f"{part:.0%}"))
    elif panel != _MEAN and lines:
        every = np.concatenate(list(lines.values()))
        positive = every[every > 0]
        if len(positive) and (panel == _UPDATE or positive.max() > _WIDE * positive.min()):
            _set_log(axes)
    if panel == _UPDATE:
        axes.axhspan(*BAND, color=USUAL, linewidth=0, zorder=0, label="usual: 1e-4 to 1e-2")
    if panel != _MEAN:
        _set_legend(axes)


def _draw_histograms(axes: Axes, side: Axes, history: History, role: str, bins: Reals) -> None:
    """Draw a column of bins for each step, from the most negative bin that was ever filled."""
    filled = np.flatnonzero(np.nan_to_num(bins).max(axis=0) > 0)
    middle = bins.shape[1] // 2
    least = max(1, min(abs(filled - middle)[filled != middle], default=1))
    # the bins nearer to zero than any value are left out
    keep = [b for b in range(filled[0], filled[-1] + 1) if b == middle or abs(b - middle) >= least]
    with np.errstate(divide="ignore"):
        powers = np.maximum(np.log10(bins[:, keep].T), _SMALLEST - 1)
    bar = _draw_heat(axes, side, _step_edges(history), powers, _BINS, (_SMALLEST, 0))
    ticks = list(range(_SMALLEST, 1))
    bar.set_ticks(ticks, labels=[f"{100 * 10.0**power:g}%" for power in ticks])
    axes.set_ylim(-0.5, len(keep) - 0.5)
    _set_title(axes, f"{role}: which part of the values, by sign and power of four")
    borders = {  # the outer one of each bin
        place + 0.5 * np.sign(bin_ - middle): (
            "-" * (bin_ < middle) + power_of_two(int(np.log2(EDGES[abs(bin_ - middle)])))
            if bin_ != middle
            else "0"
        )
        for place, bin_ in enumerate(keep)
    }
    step = math.ceil(len(borders) / 9)
    start = keep.index(middle) % step if middle in keep else 0
    named = dict(list(borders.items())[start::step])
    axes.set_yticks(list(named), labels=list(named.values()), fontsize=8)
