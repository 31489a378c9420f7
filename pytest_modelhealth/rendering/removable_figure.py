"""A picture of the units that can go: a row a layer, a place a unit."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.removal.result import RemovableUnits
from pytest_modelhealth.rendering.figure import (
    ACTIVATIONS,
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
from pytest_modelhealth.rendering.removable import line, runs
from pytest_modelhealth.report.removable import RemovableLayer

UNREAD = "#7b5ea7"
_LEAST = 0.002
"""The least part of a row that a run of units is drawn in, to be seen in a layer of thousands."""


def plot(result: RemovableUnits) -> Figure:
    """Return a figure with a row for each layer, the first at the top.

    A row stands for all units of a layer, in their order from left to right; those that can go are
    coloured by why.

    Raises:
        InspectionError: the model has no layer whose units were looked at.
    """
    sizes = result.record.sizes
    if not sizes:
        raise InspectionError(
            "there is nothing to draw: no linear layer or convolution inside the model ran, but "
            "those that give its outputs"
        )
    figure, axes = new_figure(9, 1.7 + 0.26 * len(sizes))
    for row, (name, units) in enumerate(sizes.items()):
        axes.barh(row, 1.0, height=0.72, color=FAINT, zorder=1)
        layer = result.layers.get(name)
        if layer is not None:
            _draw(axes, row, units, layer)
    names = [abbreviate(drawable(name), NAME_WIDTH) or "the model" for name in sizes]
    counts = [_count(result.layers.get(name), units) for name, units in sizes.items()]
    name_rows(axes, names, (), (), counts)
    axes.set_xlim(0.0, 1.0)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel("units of a layer, in their order", color=INK, fontsize=9)
    handles = [Patch(color=color, label=label) for label, color in _COLOURS.items()]
    figure.legend(
        handles=[*handles, Patch(color=FAINT, label="stays")], loc="outside lower center",
        ncols=4, frameon=False, fontsize=8.5, labelcolor=INK,
    )  # fmt: skip
    set_title(figure, drawable(line(result)))
    return figure


_COLOURS = {"inactive": ACTIVATIONS, "duplicate": PARAMETERS, "unread": UNREAD}


def _count(layer: RemovableLayer | None, units: int) -> str:
    return f"{0 if layer is None else len(layer.removable):,} of {units:,}"


def _draw(axes: Axes, row: int, units: int, layer: RemovableLayer) -> None:
    kinds = {
        "inactive": layer.inactive,
        "duplicate": tuple(unit for unit, _ in layer.duplicates),
        "unread": layer.unread,
    }
    for kind, indices in kinds.items():
        bars = [(first / units, max(length / units, _LEAST)) for first, length in runs(indices)]
        axes.broken_barh(bars, (row - 0.36, 0.72), facecolors=_COLOURS[kind], zorder=2)
