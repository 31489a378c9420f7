"""A picture of a comparison: each layer's error beside its natural noise, through depth."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pytest_modelhealth.comparison.comparison import AlignedLayer, Comparison
from pytest_modelhealth.comparison.results import TensorResult
from pytest_modelhealth.rendering.figure import (
    ACTIVATIONS,
    ALARM,
    FAINT,
    INK,
    NAME_WIDTH,
    PARAMETERS,
    drawable,
    name_rows,
    new_figure,
    set_title,
)
from pytest_modelhealth.rendering.notation import abbreviate

FORWARD, BACKWARD = ("activations",), ("gradients", "parameter_gradients")
NOISE = "#b3bac4"
LEAST = 1e-9
"""Where an error of zero is drawn."""


def figures(comparison: Comparison) -> dict[str, Figure]:
    """Return the figures that explain a verdict, by name."""
    return {"error_depth": plot_errors(comparison)}


def plot_errors(comparison: Comparison) -> Figure:
    """Return a figure of relative L2 errors, forward and backward, the first layer at the top.

    The bar of a row ends where the noise times the factor does: up to there rounding explains an
    error. Rows that have diverged are tinted; the culprit's name is red. No error is drawn hollow
    at the left edge, what has no number (NaN, another shape, a missing gradient) as a cross at the
    right.
    """
    layers = [layer for layer in comparison.layers.values() if layer.tensors]
    figure, axes = new_figure(9, 1.8 + 0.24 * len(layers))
    axes.set_xscale("log")
    largest = max((_error(r) for layer in layers for r in layer.tensors), default=0.0)
    high = 10.0 ** math.ceil(math.log10(max(largest, 1e-6)) + 0.5)
    axes.set_xlim(LEAST / 2, high)
    _draw_limits(axes, layers)
    for roles, color, marker, name in (
        (FORWARD, ACTIVATIONS, "o", "activations"),
        (BACKWARD, PARAMETERS, "^", "gradients"),
    ):
        _draw(axes, [layer.worst(*roles) for layer in layers], color, marker, name, high)
    found = comparison.first_divergence
    name_rows(
        axes,
        [abbreviate(drawable(layer.label), NAME_WIDTH) for layer in layers],
        [row for row, layer in enumerate(layers) if found and layer.name == found.layer],
        [row for row, layer in enumerate(layers) if layer.diverged],
    )
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    axes.set_xlabel("error relative to the reference (L2)", color=INK, fontsize=9)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8.5, labelcolor=INK)
    verdict = "equivalent" if comparison.equivalent else "not equivalent"
    set_title(figure, drawable(f"{verdict}: {comparison.reference} and {comparison.candidate}"))
    return figure


def _error(result: TensorResult) -> float:
    relative = result.difference.relative_l2 if result.difference is not None else math.inf
    return relative if math.isfinite(relative) else 0.0


def _draw_limits(axes: Axes, layers: Sequence[AlignedLayer]) -> None:
    """Draw how far rounding explains an error of the activations, a bar a layer."""
    results = [layer.worst(*FORWARD) for layer in layers]
    limits = [0.0 if r is None else r.noise * r.limit for r in results]
    label = "explained by rounding"
    axes.barh(
        range(len(layers)), limits, height=0.8, color=NOISE, alpha=0.45, label=label, zorder=1
    )


def _draw(
    axes: Axes,
    results: Sequence[TensorResult | None],
    color: str,
    marker: str,
    name: str,
    high: float,
) -> None:
    rows = np.array([row for row, result in enumerate(results) if result is not None])
    seen = [result for result in results if result is not None]
    errors = np.array([_error(result) for result in seen])
    wordless = np.array([math.isinf(result.ratio) and not _error(result) for result in seen])
    if not seen:
        return
    shown = np.where(errors > 0, np.maximum(errors, LEAST), math.nan)
    axes.plot(
        shown, rows, color=color, marker=marker, markersize=4, linewidth=1, label=name, zorder=3
    )
    equal = rows[(errors == 0) & ~wordless]
    axes.plot(
        np.full(len(equal), LEAST), equal, marker, color=color, markerfacecolor="white",
        markersize=4, zorder=3,
    )  # fmt: skip
    bad = rows[wordless]
    axes.plot(np.full(len(bad), high), bad, "x", color=ALARM, clip_on=False, zorder=4)
