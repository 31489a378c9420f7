"""One layer through a training: moments, gradients, updates, and how its values spread."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from pytest_modelhealth.rendering.figure import INK, drawable
from pytest_modelhealth.rendering.notation import power_of_two, shorten
from pytest_modelhealth.rendering.progress import BAND, layer_label, nonfinite, remarks
from pytest_modelhealth.rendering.timeline import (
    FAINT,
    MISSING,
    NAME_WIDTH,
    USUAL,
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
from pytest_modelhealth.training.monitoring.row import BINNED, EDGES, Fractions

_ACTIVATIONS, _PARAMETERS = "#4c78a8", "#e08214"
_LINE, _HISTOGRAM = 1.15, 2.0
"""Inches of a panel of lines and of one of histograms."""

_LARGEST = 1e150

_SMALLEST = -4
"""Power of ten of the smallest part of the values that has a colour."""

_COLORS = colormaps["YlGnBu"].with_extremes(bad=MISSING, under="white")
"""Of bins; an empty one is white, and grey where there is nothing finite."""

_WIDE = 30
"""Values that reach over a larger factor are drawn on a log scale."""

_PANELS = {
    "activations: mean, and a standard deviation to both sides": (),
    "activations: scale": (
        ("activation_abs_max", "largest magnitude", INK),
        ("activation_std", "standard deviation", _ACTIVATIONS),
    ),
    "dead units and zeros, part of all": (
        ("dead_fraction", "dead units", INK),
        ("zero_fraction", "zeros", "#8a8f98"),
    ),
    "gradient norm": (
        ("gradient_norm", "activations", _ACTIVATIONS),
        ("parameter_gradient_norm", "parameters", _PARAMETERS),
    ),
    "update ratio": (("update_ratio", "update ratio", INK),),
}
_MEAN, _SCALE, _PARTS, _GRADIENT, _UPDATE = _PANELS


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
    values = {
        panel: {name: history[layer, name] for name, _, _ in lines}
        for panel, lines in _PANELS.items()
    }
    values[_MEAN] = {name: history[layer, f"activation_{name}"] for name in ("mean", "std")}
    has_bad_values = history[layer, "activation_nonfinite"] > 0
    for part in values[_PARTS].values():
        part[has_bad_values] = math.nan
    values[_PARTS] = {n: part for n, part in values[_PARTS].items() if (part > 0).any()}
    for lines in values.values():
        for name, line in lines.items():  # none so large that matplotlib would overflow
            usual = np.clip(line, -_LARGEST, _LARGEST)
            lines[name] = np.where(np.isfinite(line), usual, math.nan)
    is_bad = nonfinite(history)[:, history.layers.index(layer)]
    for line in (values[_GRADIENT] | values[_SCALE]).values():
        line[is_bad & (line == 0)] = math.nan  # of no finite value
    drawn = [
        panel
        for panel, lines in values.items()
        if any(np.isfinite(line).any() for line in lines.values())
    ]
    roles = BINNED if history.has_histograms else ()
    kept = {role: history.histograms(layer, role) for role in roles}
    spread = {role: seen for role, seen in kept.items() if np.isfinite(seen).any()}
    heights = [_LINE] * len(drawn) + [_HISTOGRAM] * len(spread)
    name = shorten(drawable(history.model_type), NAME_WIDTH)
    title = f"{drawable(layer_label(layer))} in the training of {name}"
    figure, panels, sides = new_timeline(history, title, heights or [_LINE])
    bad = history.steps[is_bad]
    for axes, panel in zip(panels, drawn, strict=False):
        _draw(axes, history, panel, values[panel])
    rest = slice(len(drawn), None)
    for axes, side, (role, fractions) in zip(
        panels[rest], sides[rest], spread.items(), strict=False
    ):
        _draw_histograms(axes, side, history, role, fractions)
    if not heights:
        set_subtitle(panels[0], "nothing finite was seen of this layer")
        panels[0].set_yticks([])
    draw_crosses(panels[0], bad, "not finite")
    said = [f"{r.text} since step {r.since}" for r in remarks(history) if r.layer == layer]
    if said:
        set_subtitle(panels[0], f"{said[0]}\n\n{panels[0].get_title(loc='left')}")
    draw_events(figure, panels, [event for event in sorted_events(events) if event.layer == layer])
    return figure


def _draw(axes: Axes, history: History, panel: str, values: dict[str, Reals]) -> None:
    set_subtitle(axes, panel)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    steps = history.steps
    if panel == _MEAN:
        mean, std = values["mean"], values["std"]
        axes.fill_between(
            steps, mean - std, mean + std, color=_ACTIVATIONS, alpha=0.25, linewidth=0
        )
        axes.plot(steps, mean, color=INK, linewidth=1.2)
        _compress(axes, mean, std)
        return
    is_log = panel != _PARTS and _is_wide(panel, values.values())
    for name, label, color in _PANELS[panel]:
        if name not in values:
            continue
        line = values[name]
        zero = steps[line == 0] if is_log else steps[:0]
        axes.plot(
            steps, np.where(line > 0, line, math.nan) if is_log else line,
            color=color, linewidth=1.2, label=label if np.isfinite(line).any() else None,
        )  # fmt: skip
        if len(zero):
            axes.plot(
                zero, [0.04] * len(zero), ".", color=color, markersize=3, clip_on=False,
                transform=axes.get_xaxis_transform(), label=f"{label}: zero",
            )  # fmt: skip
    if is_log:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif panel == _PARTS:
        axes.set_ylim(-0.03, 1.03)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda part, _: f"{part:.0%}"))
    if panel == _UPDATE:
        axes.axhspan(*BAND, color=USUAL, linewidth=0, zorder=0, label="usual: 1e-4 to 1e-2")
    set_legend(axes)


def _is_wide(panel: str, lines: Iterable[Reals]) -> bool:
    """Return whether values are drawn on a log scale."""
    every = np.concatenate(list(lines))
    positive = every[np.isfinite(every) & (every > 0)]
    return bool(len(positive)) and (
        panel == _UPDATE or bool(positive.max() > _WIDE * positive.min())
    )


def _compress(axes: Axes, mean: Reals, std: Reals) -> None:
    """Have a panel show what is usual, too, where some values are far larger."""
    reach = np.abs(mean) + std
    reach = reach[np.isfinite(reach) & (reach > 0)]
    if len(reach) and reach.max() > 100 * np.median(reach):
        axes.set_yscale("symlog", linthresh=float(np.median(reach)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        power = math.log10(reach.max())
        axes.set_yticks([0.0, *(sign * 10.0 ** math.floor(power) for sign in (-1, 1))])


def _draw_histograms(
    axes: Axes, side: Axes, history: History, role: str, fractions: Fractions
) -> None:
    """Draw a column of bins for each step, from the most negative bin that was ever filled."""
    filled = np.flatnonzero(np.nan_to_num(fractions).max(axis=0) > 0)
    middle = fractions.shape[1] // 2
    inner = min(abs(filled - middle)[filled != middle], default=1)
    lowest = max(1, min(inner, middle))
    keep = [b for b in range(filled[0], filled[-1] + 1) if b == middle or abs(b - middle) >= lowest]
    shown = fractions[:, keep].T.astype(float)
    with np.errstate(divide="ignore"):
        powers = np.maximum(np.log10(shown), _SMALLEST - 1)
    edges = step_edges(history.steps)
    bar = draw_heat(axes, side, edges, powers, _COLORS, (_SMALLEST, 0))
    ticks = range(_SMALLEST, 1)
    bar.set_ticks(list(ticks), labels=[f"{100 * 10.0**power:g}%" for power in ticks])
    axes.set_ylim(-0.5, len(keep) - 0.5)
    set_subtitle(axes, f"{role}: which part of the values, by sign and power of four")
    powers_of_two = np.log2(EDGES).astype(int)
    borders = [  # the outer ones of bins, and the value there
        (
            place + (0.5 if number > middle else -0.5),
            "-" * (number < middle) + power_of_two(int(powers_of_two[abs(number - middle)])),
        )
        for place, number in enumerate(keep)
        if number != middle
    ]
    step = max(1, math.ceil(len(borders) / 9))
    named = dict(borders[::-step])
    if middle in keep:
        zero = keep.index(middle)
        named = {y: text for y, text in named.items() if abs(y - zero) > len(keep) / 18}
        named[zero] = "0"
    axes.set_yticks(list(named), labels=list(named.values()), fontsize=8)
