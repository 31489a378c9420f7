"""What all figures look like: size, colours, titles, named rows.

Figures are made without pyplot: no global state, no window, nothing to close. One report always
gives the same bytes.
"""

from __future__ import annotations

import io
import math
from collections.abc import Collection, Sequence
from functools import cache

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font

from pytest_modelhealth.rendering.notation import abbreviate, printable, shorten
from pytest_modelhealth.rendering.summary import by_layer
from pytest_modelhealth.report import HealthReport, LayerRecord

ACTIVATIONS, PARAMETERS = "#4c78a8", "#e08214"
INK, FAINT, ALARM = "#24292f", "#dfe3e8", "#c62828"

NAME_WIDTH = 36
"""Characters of a layer's name in a figure."""

MOST_NAMES = 200
"""Rows of a figure that are named; of more, one of every two, three, ...: a violated one first."""


class HealthFigure(Figure):
    """A figure that notebooks show without pyplot being imported."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a white figure whose colours do not depend on the user's style."""
    height = min(height, 1.6 + 0.24 * MOST_NAMES)
    figure = HealthFigure(figsize=(width, height), layout="constrained", facecolor="white")
    axes = figure.add_subplot(facecolor="white")
    set_style(axes)
    return figure, axes


def set_style(axes: Axes) -> None:
    """Give axes the ticks and spines of all figures."""
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8.5, length=3)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)


def set_title(figure: Figure, text: str) -> None:
    """Put a title at the top left, taken literally."""
    figure.suptitle(
        text, x=0.01, ha="left", fontsize=11.5, fontweight="bold", color=INK, parse_math=False
    )


def set_subtitle(axes: Axes, text: str) -> None:
    """Put a line at the top left of the axes, taken literally."""
    axes.set_title(text, loc="left", fontsize=9, color=INK, parse_math=False)


def name_rows(
    axes: Axes,
    names: Sequence[str],
    marked: Collection[int],
    tinted: Collection[int],
    margin: Sequence[str] = (),
) -> None:
    """Name the rows on the left, say something on the right; `marked` rows are named in red."""
    rows = range(len(names))
    step = max(1, math.ceil(len(names) / MOST_NAMES))
    groups = [rows[start : start + step] for start in rows[::step]]
    named = [max(group, key=lambda row: row in marked) for group in groups]
    _name(axes, names, named, marked)
    if margin:
        right = axes.twinx()
        _name(right, margin, named, marked)
        right.tick_params(length=0, pad=8)
        right.spines[:].set_visible(False)
    for row in tinted:
        axes.axhspan(row - 0.5, row + 0.5, color=ALARM, alpha=0.08, linewidth=0, zorder=0)


def _name(axes: Axes, texts: Sequence[str], named: list[int], marked: Collection[int]) -> None:
    axes.set_ylim(len(texts) - 0.4, -0.6)
    axes.set_yticks(named, labels=[texts[row] for row in named], parse_math=False, fontsize=8)
    for row, label in zip(named, axes.get_yticklabels(), strict=True):
        label.set_color(ALARM if row in marked else INK)


def name_layers(
    axes: Axes, report: HealthReport, records: Sequence[LayerRecord], margin: Sequence[str]
) -> None:
    """Name a row for each layer, and mark the violated ones."""
    found = by_layer(report.violations)
    violated = [row for row, record in enumerate(records) if record.name in found]
    name_rows(axes, [layer_name(record) for record in records], violated, violated, margin)


def layer_name(record: LayerRecord) -> str:
    """Return a layer's name as it is drawn."""
    return abbreviate(drawable(record.label), NAME_WIDTH)


def model_name(report: HealthReport) -> str:
    """Return the model's class as it is drawn."""
    return shorten(drawable(report.observation.model_type), NAME_WIDTH)


def drawable(text: str) -> str:
    """Return `text` with an escape for each character that the figure's font lacks.

    matplotlib would warn, and a warning fails the test of a user who turns warnings into errors.
    """
    return "".join(
        letter if _has_glyph(letter) else letter.encode("unicode_escape").decode()
        for letter in printable(text)
    )


@cache
def _has_glyph(letter: str) -> bool:
    return letter.isascii() or bool(
        get_font(findfont(FontProperties())).get_char_index(ord(letter))
    )
