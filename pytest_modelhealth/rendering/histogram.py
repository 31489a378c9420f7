"""Pictures of a report: histograms and gradient flow, and what all figures look like.

Figures are made without pyplot: no global state, no window, nothing to close. One report always
gives the same bytes.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.ticker import MaxNLocator

from pytest_modelhealth.checks.evidence import leaves
from pytest_modelhealth.errors import InspectionError, LayerNotFoundError, suggest
from pytest_modelhealth.rendering.evidence import (
    bulk_start,
    culprit_and_predecessor,
    normal_exponents,
)
from pytest_modelhealth.rendering.notation import (
    abbreviate,
    number,
    percent,
    plural,
    power_of_two,
    printable,
    shape,
    shorten,
)
from pytest_modelhealth.rendering.summary import norm, violations_by_layer
from pytest_modelhealth.report import HealthReport, LayerRecord, Violation
from pytest_modelhealth.statistics import TensorStatistics

NEGATIVE, ZERO, POSITIVE = "#4c78a8", "#8a8f98", "#e08214"
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


def figures(report: HealthReport) -> dict[str, Figure]:
    """Return the figures that explain a verdict, by name; only those there is something for.

    ``culprit`` and ``predecessor`` are histograms in the role that is violated, ``gradient_flow``
    shows the whole model.
    """
    made: dict[str, Figure] = {}
    found = culprit_and_predecessor(report)
    for name in ("culprit", "predecessor") if found else ():
        record = getattr(found, name)
        seen = record and found and found.statistics(record)
        if found and seen:
            made[name] = _histogram(report, record, seen, found.role)
    if any(record.tensors(role) for record in report for role in _FLOWING):
        made["gradient_flow"] = plot_gradient_flow(report)
    return made


def plot_histogram(report: HealthReport, layer: str, what: str = "activations") -> Figure:
    """Return a figure of one layer's values by sign and power of two.

    Args:
        report: the report.
        layer: a layer's name or one of its aliases.
        what: the role; where it has several tensors, they are merged.

    Raises:
        LayerNotFoundError: no such layer or role; the message names the nearest.
        InspectionError: the layer has nothing in this role; the message says why.
    """
    record = report[layer]
    seen = record.statistics(what)
    if seen is None:
        raise InspectionError(record.why_not_seen(what))
    return _histogram(report, record, seen, what)


def _histogram(
    report: HealthReport, record: LayerRecord, seen: TensorStatistics, what: str
) -> Figure:
    figure, axes = new_figure(8, 4.4)
    axis = _ExponentAxis.over([seen])
    for sign, positions, counts in axis.parts(seen):
        axes.bar(positions, counts, width=0.94, color=_COLORS[sign], zorder=2)
    axis.draw(axes)
    axis.draw_limits_of_dtype(axes, seen)
    axes.set_xlabel("value, a bin for each sign and power of two", color=INK, fontsize=9)
    axes.set_ylabel("number of values", color=INK, fontsize=9)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7, integer=True))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.set_ylim(0, 1.2 * max(1, seen.histogram.counts.max()))
    set_title(figure, f"{_name(record)}: {what.replace('_', ' ')}")
    kind = shorten(drawable(record.type_name), 30)
    _subtitle(axes, f"{kind}, {seen.dtype}, {shape(seen.shape)}, {plural(seen.count, 'value')}")
    _alarm(axes, [*_nonfinite(seen), *_violations(report, record, what)])
    if seen.count and not seen.finite_count:
        axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center", color=INK)
    figure.supxlabel(_caption(seen), fontsize=9, color=INK)
    return figure


def _nonfinite(seen: TensorStatistics) -> list[str]:
    kinds = {
        "NaN": seen.nan_count,
        "+inf": seen.positive_inf_count,
        "-inf": seen.negative_inf_count,
    }
    return [
        f"{kind}: {count:,} ({percent(count / seen.count)})"
        for kind, count in kinds.items()
        if count
    ]


def _violations(report: HealthReport, record: LayerRecord, what: str) -> list[str]:
    return [
        f"{found.check}: {drawable(found.message)}"
        for found in violations_by_layer(report).get(record.name, ())
        if found.role == what
    ]


def _alarm(axes: Axes, lines: Iterable[str]) -> None:
    """Write what is wrong into the upper right corner of the axes."""
    text = "\n".join(part for line in lines for part in textwrap.wrap(line, 46))
    box = {"facecolor": "white", "edgecolor": ALARM, "linewidth": 0.6, "alpha": 0.9}
    if text:
        axes.text(
            0.985, 0.96, text, transform=axes.transAxes, ha="right", va="top", color=ALARM,
            fontsize=9, bbox=box | {"boxstyle": "round,pad=0.4"}, zorder=4, parse_math=False,
        )  # fmt: skip


def _caption(seen: TensorStatistics) -> str:
    parts = {
        "mean": number(seen.mean),
        "std": number(seen.std),
        "min": number(seen.min),
        "max": number(seen.max),
        "L2 norm": number(norm(seen)),
        "zeros": percent(seen.zero_fraction),
        "dead units": percent(seen.dead_fraction),
        "bins": "of a sample" if seen.histogram_sampled else "-",
    }
    return "     ".join(f"{name} {text}" for name, text in parts.items() if text != "-")


def plot_histograms(report: HealthReport, pattern: str = "*", what: str = "activations") -> Figure:
    """Return a figure with a row for each layer that matches `pattern`, in execution order.

    The rows share the axis of values; each is scaled to its own highest bin. The bins beside zero
    also hold what is smaller, up to a hundredth of a layer's values. How many matching
    layers have nothing in role `what` is said below.

    Raises:
        LayerNotFoundError: no layer matches, or no such role; the message names the nearest.
        InspectionError: no layer that matches has anything in this role.
    """
    matched = [record for record in report if fnmatchcase(record.name, pattern)]
    if not matched:
        nearest = suggest(pattern, report.layers)
        raise LayerNotFoundError(f"no layer matches {pattern!r}{nearest} report.layers lists all.")
    shown = [(record, seen) for record in matched if (seen := record.statistics(what)) is not None]
    if not shown:
        raise InspectionError(matched[0].why_not_seen(what))
    records = [record for record, _ in shown]
    axis = _ExponentAxis.over([seen for _, seen in shown], bulk=True)
    figure, axes = new_figure(9, 1.5 + 0.42 * len(shown))
    for row, (_, seen) in enumerate(shown):
        highest = max(1, seen.histogram.counts.max())
        for sign, positions, counts in axis.parts(seen):
            # rows go downwards, so a bar ends above its row's baseline at a smaller y
            tops = row + 0.4 - 0.85 * counts / highest
            edges = np.append(positions - 0.5, positions[-1:] + 0.5)
            axes.stairs(tops, edges, baseline=row + 0.4, fill=True, color=_COLORS[sign], zorder=2)
    axis.draw(axes)
    _name_rows(axes, report, records, [_moments(seen) for _, seen in shown])
    axes.grid(axis="y", color=FAINT, linewidth=0.4)
    axes.set_xlabel("value, a bin for each sign and power of two", color=INK, fontsize=9)
    set_title(figure, f"{what.replace('_', ' ')} of {_model(report)}")
    left_out = len(matched) - len(shown)
    if left_out:
        figure.supxlabel(
            f"{plural(left_out, 'matching layer')} without {what.replace('_', ' ')} left out",
            fontsize=9, color=INK,
        )  # fmt: skip
    return figure


def _moments(seen: TensorStatistics) -> str:
    text = f"{number(seen.mean)} ± {number(seen.std)}"
    return text if not seen.nonfinite_count else f"{text}, {seen.nonfinite_count:,} not finite"


_FLOWING = {
    "gradients": ("activations", ACTIVATIONS, "o"),
    "parameter_gradients": ("parameters", PARAMETERS, "D"),
}
"""The roles of the gradient flow, and how each is called and drawn."""


def plot_gradient_flow(report: HealthReport) -> Figure:
    """Return a figure of gradient norms through the model, the first layer at the top.

    A row is a layer with gradients that contains no other; a container is one only where it has
    parameters of its own or a violation, since its output is that of a layer in it. Norms are L2
    norms of the finite values on a log scale; a norm of zero is drawn hollow at the left edge, a
    layer with NaN or infinity as a cross at the right.

    Raises:
        InspectionError: no gradient was observed.
    """
    found = violations_by_layer(report)
    shown = {record.name for record in leaves(report.observation)} | set(found)
    records = [
        record
        for record in report
        if (record.gradients is not None and record.name in shown) or record.parameter_gradients
    ]
    if not records:
        why = (
            "no layer of those watched has a gradient"
            if report.observation.backward
            else "no backward pass ran"
        )
        raise InspectionError(f"no gradients were seen of {_model(report)}: {why}.")
    figure, axes = new_figure(9, 1.6 + 0.24 * len(records))
    flows = [_Flow.through(records, role) for role in _FLOWING]
    low, high = _decades([norm for flow in flows for norm in flow.norms])
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    for flow in flows:
        flow.draw(axes, low, high)
    _name_rows(axes, report, records, [_checks(found.get(record.name, ())) for record in records])
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    axes.set_xlabel("L2 norm of the gradient of the loss", color=INK, fontsize=9)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8.5, labelcolor=INK)
    set_title(figure, f"gradient flow of {_model(report)}")
    return figure


@dataclass(frozen=True)
class _Flow:
    """One role's gradient norms by row of the figure."""

    role: str
    rows: npt.NDArray[np.int64]
    norms: npt.NDArray[np.float64]
    nonfinite: npt.NDArray[np.bool_]

    @classmethod
    def through(cls, records: Sequence[LayerRecord], role: str) -> _Flow:
        found = [
            (row, norm(seen), seen.nonfinite_count > 0)
            for row, record in enumerate(records)
            if (seen := record.statistics(role)) is not None
        ]
        rows, norms, nonfinite = zip(*found, strict=True) if found else ((), (), ())
        return cls(
            role,
            np.array(rows, dtype=np.int64),
            np.array(norms, dtype=np.float64),
            np.array(nonfinite, dtype=np.bool_),
        )

    def draw(self, axes: Axes, low: float, high: float) -> None:
        """Draw the norms; `low` and `high` are where zeros and what is not finite go."""
        name, color, marker = _FLOWING[self.role]
        drawable = np.where(self.norms > 0, self.norms, math.nan)
        zero, bad = self.rows[self.norms == 0], self.rows[self.nonfinite]
        edge: dict[str, Any] = {"linestyle": "none", "clip_on": False, "zorder": 4, "markersize": 6}
        if len(self.rows):
            axes.plot(
                drawable, self.rows, color=color, marker=marker, markersize=4, linewidth=1,
                alpha=0.9, label=name, zorder=3,
            )  # fmt: skip
        if len(zero):
            hollow: dict[str, Any] = {
                "markerfacecolor": "white",
                "color": color,
                "label": f"{name}: zero",
            }
            axes.plot(np.full(len(zero), low), zero, marker=marker, **hollow, **edge)
        if len(bad):
            label = f"{name}: NaN or inf"
            # a cross of each kind, so that two in one row are both seen
            cross = "x" if self.role == "gradients" else "+"
            axes.plot(np.full(len(bad), high), bad, cross, color=ALARM, label=label, **edge)


def _checks(violations: Iterable[Violation]) -> str:
    return ", ".join(dict.fromkeys(violation.check for violation in violations))


def _decades(norms: Sequence[float]) -> tuple[float, float]:
    """Return limits that leave half a decade beside the smallest and the greatest norm."""
    powers = [math.log10(value) for value in norms if value > 0 and math.isfinite(value)] or [0.0]
    return 10 ** (min(powers) - 0.5), 10 ** (max(powers) + 0.5)


_COLORS = (NEGATIVE, ZERO, POSITIVE)


@dataclass(frozen=True)
class _ExponentAxis:
    """An axis of values, logarithmic to both sides of a bin for zero.

    The bin of values from ``2**e`` to ``2**(e + 1)`` stands at ``e - lowest + 1``, that of the
    negative values at minus that, and the zeros at 0. Smaller values are in the bin of `lowest`.
    """

    lowest: int
    highest: int
    has_negative: bool
    has_positive: bool

    @classmethod
    def over(cls, tensors: Sequence[TensorStatistics], *, bulk: bool = False) -> _ExponentAxis:
        """Return an axis for all `tensors`; with `bulk`, one bin takes their smallest values."""
        filled = [seen.exponents for seen in tensors if len(seen.exponents.counts)]
        starts = [bulk_start(seen) - 1 for seen in tensors if bulk and len(seen.exponents.counts)]
        return cls(
            min(starts or [exponents.lowest for exponents in filled], default=0),
            max((exponents.highest for exponents in filled), default=0),
            any(exponents.counts[:, 0].any() for exponents in filled),
            any(exponents.counts[:, 1].any() for exponents in filled),
        )

    def parts(
        self, seen: TensorStatistics
    ) -> Iterable[tuple[int, npt.NDArray[np.float64], npt.NDArray[np.int64]]]:
        """Yield positions and counts of the negative values, the zeros, the positive ones."""
        counts, first = seen.exponents.counts, seen.exponents.lowest - self.lowest
        if first < 0 < len(counts):
            smallest = counts[: 1 - first].sum(axis=0, keepdims=True)
            counts, first = np.concatenate([smallest, counts[1 - first :]]), 0
        positions = np.arange(len(counts), dtype=np.float64) + first + 1
        if len(counts):
            yield 0, -positions[::-1], counts[::-1, 0]
        yield 1, np.zeros(1), np.array([seen.zero_count])
        if len(counts):
            yield 2, positions, counts[:, 1]

    def draw(self, axes: Axes) -> None:
        """Set limits and ticks; the ticks are powers of two, at the borders of bins."""
        reach = self.highest - self.lowest + 1
        axes.set_xlim(
            -reach - 1 if self.has_negative else -1, reach + 1 if self.has_positive else 1
        )
        signs = self.has_negative + self.has_positive
        step = max(1, math.ceil(reach * max(1, signs) / 10))
        powers = range(self.highest + 1, self.lowest - 1, -step)
        borders = [(e - self.lowest + 0.5, power_of_two(e)) for e in powers]
        # the border beside the zeros would be written over their 0, unless bins are very wide
        positive = [(x, text) for x, text in borders if x > 0.5 or reach == 1]
        ticks = [(0.0, "0")]
        if self.has_positive:
            ticks += positive
        if self.has_negative:
            ticks += [(-x, f"-{text}") for x, text in positive]
        axes.set_xticks([x for x, _ in ticks], labels=[text for _, text in ticks], fontsize=8.5)

    def draw_limits_of_dtype(self, axes: Axes, seen: TensorStatistics) -> None:
        """Shade the bins that the dtype holds with less precision, or nearly cannot hold."""
        smallest, largest = normal_exponents(seen.dtype)
        reach = self.highest - self.lowest + 1
        subnormal = min(smallest - self.lowest, reach)
        near_overflow = max(largest - self.lowest, 0)
        spans = []
        if subnormal > 0:
            spans.append((0.5, subnormal + 0.5, f"subnormal {seen.dtype}"))
        if near_overflow < reach:
            spans.append((near_overflow + 0.5, reach + 0.5, f"near {seen.dtype}'s maximum"))
        for start, end, name in spans:
            for sign, drawn in ((-1, self.has_negative), (1, self.has_positive)):
                if drawn:
                    axes.axvspan(sign * start, sign * end, color=ALARM, alpha=0.09, linewidth=0)
            axes.fill_between([], [], color=ALARM, alpha=0.09, linewidth=0, label=name)
        if spans:
            axes.legend(loc="upper left", frameon=False, fontsize=8.5, labelcolor=INK)


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a white figure whose colours do not depend on the user's style."""
    height = min(height, 1.6 + 0.24 * MOST_NAMES)
    figure = HealthFigure(figsize=(width, height), layout="constrained", facecolor="white")
    axes = figure.add_subplot(facecolor="white")
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8.5, length=3)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(INK)
    return figure, axes


def set_title(figure: Figure, text: str) -> None:
    """Put a title at the top left, taken literally."""
    figure.suptitle(
        text, x=0.01, ha="left", fontsize=11.5, fontweight="bold", color=INK, parse_math=False
    )


def _subtitle(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=9, color=INK, parse_math=False)


def _name_rows(
    axes: Axes,
    report: HealthReport,
    records: Sequence[LayerRecord],
    margin: Sequence[str],
) -> None:
    """Name the rows on the left, say something on the right, and mark the violated ones."""
    found = violations_by_layer(report)
    step = math.ceil(len(records) / MOST_NAMES)
    groups = [range(len(records))[start : start + step] for start in range(0, len(records), step)]
    named = [max(group, key=lambda row: records[row].name in found) for group in groups]
    right = axes.twinx()
    for side, texts in ((axes, [_name(record) for record in records]), (right, margin)):
        side.set_ylim(len(records) - 0.4, -0.6)
        side.set_yticks(named, labels=[texts[i] for i in named], parse_math=False, fontsize=8)
        for index, label in zip(named, side.get_yticklabels(), strict=True):
            label.set_color(ALARM if records[index].name in found else INK)
    right.tick_params(length=0, pad=8)
    right.spines[:].set_visible(False)
    for row, record in enumerate(records):
        if record.name in found:
            axes.axhspan(row - 0.5, row + 0.5, color=ALARM, alpha=0.08, linewidth=0, zorder=0)


def _name(record: LayerRecord) -> str:
    return abbreviate(drawable(record.label), NAME_WIDTH)


def _model(report: HealthReport) -> str:
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
