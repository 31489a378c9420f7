"""Histograms of a report's layers, and the figures that explain its verdict."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pytest_modelhealth.errors import InspectionError, LayerNotFoundError, suggest_layer
from pytest_modelhealth.rendering.evidence import (
    bulk_start,
    culprit_and_predecessor,
    normal_exponents,
)
from pytest_modelhealth.rendering.figure import (
    ALARM,
    FAINT,
    INK,
    drawable,
    layer_name,
    model_name,
    name_layers,
    new_figure,
    set_subtitle,
    set_title,
)
from pytest_modelhealth.rendering.gradient_flow import FLOWING, plot_gradient_flow
from pytest_modelhealth.rendering.notation import (
    number,
    percent,
    plural,
    power_of_two,
    shape,
    shorten,
)
from pytest_modelhealth.rendering.summary import by_layer, norm
from pytest_modelhealth.report import HealthReport, LayerRecord
from pytest_modelhealth.statistics import TensorStatistics

_COLORS = ("#4c78a8", "#8a8f98", "#e08214")
"""Of negative values, zeros and positive ones."""


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
    if any(record.tensors(role) for record in report for role in FLOWING):
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
    set_title(figure, f"{layer_name(record)}: {what.replace('_', ' ')}")
    kind = shorten(drawable(record.type_name), 30)
    set_subtitle(axes, f"{kind}, {seen.dtype}, {shape(seen.shape)}, {plural(seen.count, 'value')}")
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
        for found in by_layer(report.violations).get(record.name, ())
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
        InspectionError: no layer that matches has anything in this role, or `pattern` is no string.
    """
    if not isinstance(pattern, str):
        raise InspectionError(
            f"the pattern of layers must be a shell wildcard such as 'encoder.*', not {pattern!r}"
        )
    matched = [record for record in report if fnmatchcase(record.name, pattern)]
    if not matched:
        nearest = suggest_layer(pattern, report.layers)
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
    name_layers(axes, report, records, [_moments(seen) for _, seen in shown])
    axes.grid(axis="y", color=FAINT, linewidth=0.4)
    axes.set_xlabel("value, a bin for each sign and power of two", color=INK, fontsize=9)
    set_title(figure, f"{what.replace('_', ' ')} of {model_name(report)}")
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
