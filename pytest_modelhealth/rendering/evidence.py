"""The culprit's values beside those of the layer before it, as text histograms."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pytest_modelhealth.checks.facts import leaves
from pytest_modelhealth.rendering.notation import (
    abbreviate,
    number,
    percent,
    power_of_two,
    printable,
    shape,
    table,
)
from pytest_modelhealth.rendering.summary import headline
from pytest_modelhealth.report import ROLES, Finding, HealthReport, LayerRecord
from pytest_modelhealth.settings.setting import is_inside
from pytest_modelhealth.statistics import LOWEST_EXPONENT, TensorStatistics

MAX_BINS = 10
"""Bins of both signs together, besides zero and a bin of the smallest values for each sign."""

TAIL = 0.01
"""The part of the values that one bin at the small end takes, so that the bulk is seen finely."""

BAR = 26
BLOCKS = "▏▎▍▌▋▊▉█"

Panel = tuple[str, TensorStatistics]
"""A title, and what stands below."""


class Exhibit(NamedTuple):
    """The worst violation's layer and the one computed just before it.

    Args:
        violation: the worst violation.
        culprit: its layer.
        predecessor: the layer before it that the violation names as evidence, else the layer
            without children that computed the same role just before; gradients are computed from
            the last layer to the first, so for them it is the next layer. ``None`` where no such
            layer was observed.
    """

    violation: Finding
    culprit: LayerRecord
    predecessor: LayerRecord | None = None

    @property
    def role(self) -> str:
        """The role to look at: the violated one; the activations where the loss is violated."""
        return self.violation.role if self.violation.role in ROLES else "activations"

    def statistics(self, record: LayerRecord) -> TensorStatistics | None:
        """Return what `record` showed in this role, of the violated tensor if it has it."""
        tensors = record.tensors(self.role)
        return tensors.get(self.violation.tensor) or record.statistics(self.role)


def culprit_and_predecessor(report: HealthReport) -> Exhibit | None:
    """Return the worst violation's layer and its predecessor, or ``None`` without a violation.

    Of a training it is ``None``, too: what is wrong there is in no histogram of one step.
    """
    worst = next(iter(report.violations), None)
    if worst is None or worst.layer not in report.layers or report.observation.is_of_own_step:
        return None
    alone = Exhibit(worst, report.layers[worst.layer])
    culprit, role = alone.culprit, alone.role
    for reference in worst.evidence:
        named = report.layers.get(reference.layer)
        if named is not None and named is not culprit and named.tensors(role):
            return alone._replace(predecessor=named)
    at = math.nan if culprit.entered is None else culprit.entered
    called = [
        (record.entered, record)
        for record in leaves(report.observation)
        if record.tensors(role) and record.entered is not None
    ]
    before = [pair for pair in called if pair[0] < at]
    nearest = max(before, key=lambda pair: pair[0], default=None)
    if role in ("gradients", "parameter_gradients"):
        after = [(n, r) for n, r in called if n > at and not is_inside(r.name, culprit.name)]
        nearest = min(after, key=lambda pair: pair[0], default=None)
    return alone._replace(predecessor=nearest and nearest[1])


def render(report: HealthReport) -> str:
    """Return both histograms side by side in at most 100 columns, and a line of numbers for each.

    A bin holds the values of one sign between two powers of two. Bars are of ``#`` where standard
    output cannot encode blocks.
    """
    exhibit = culprit_and_predecessor(report)
    if exhibit is None:
        return headline(report)
    culprit, before = printable(exhibit.culprit.label), exhibit.predecessor
    lines = [f"{exhibit.role.replace('_', ' ')} of {culprit} ({exhibit.violation.check})", ""]
    if before is not None:
        lines[0] += f", beside {printable(before.label)} computed just before"
    panels = [
        (_title(record), seen)
        for record in (before, exhibit.culprit)
        if record is not None and (seen := exhibit.statistics(record))
    ]
    if panels:
        try:
            BLOCKS.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
            ink = BLOCKS
        except (UnicodeEncodeError, LookupError):
            ink = "#"
        lines += [*_histograms(panels, ink), "", *_numbers(panels)]
    lines += [f"{title}: bins counted on a sample" for title, s in panels if s.histogram_sampled]
    if exhibit.statistics(exhibit.culprit) is None:
        lines.append(printable(exhibit.culprit.why_not_seen(exhibit.role)))
    return "\n".join(lines)


def _title(record: LayerRecord) -> str:
    """Return a layer's name, short enough to stand over its bars."""
    return abbreviate(printable(record.label), BAR)


def _histograms(panels: Sequence[Panel], ink: str) -> list[str]:
    tensors = [seen for _, seen in panels]
    starts = bin_starts(tensors)
    counts = np.array([[*binned(seen, starts), seen.nonfinite_count] for seen in tensors])
    parts = counts / np.array([[max(1, seen.count)] for seen in tensors])
    largest = parts.max() or 1.0
    edges = ["0", *map(power_of_two, starts)]
    positive = [f"{low} .. {high}" for low, high in pairwise(edges)]
    edges = ["0", *(f"-{edge}" for edge in edges[1:])]
    negative = [f"{low} .. {high}" for high, low in pairwise(edges)]
    rows = []
    for index, name in enumerate([*negative[::-1], "zero", *positive, "NaN, inf"]):
        rows.append([name])
        for part in parts[:, index]:
            share = f"{percent(part) if part else '':>4} "
            rows[-1] += [bar(part / largest, ink).ljust(BAR), share]
    # from the first filled bin to the last, the zeros, and what is not finite
    filled = np.flatnonzero(counts[:, :-1].any(axis=0)).tolist()
    inner = [*filled, len(positive)]
    shown = rows[min(inner) : max(inner) + 1] + rows[-1:] * bool(counts[:, -1].any())
    titles = ["", *(cell for title, _ in panels for cell in (title, ""))]
    return table([titles, *shown], left=range(1, 2 * len(panels) + 1))


def bin_starts(tensors: Iterable[TensorStatistics]) -> list[int]:
    """Return the lowest exponent of each bin and the end of the last, shared by all `tensors`.

    Values below the first are in a bin of their own, which reaches down to zero.
    """
    tensors = [seen for seen in tensors if len(seen.exponents.counts)]
    if not tensors:
        return [0, 1]
    highest = max(seen.exponents.highest for seen in tensors)
    # the lowest exponent kept also holds what is smaller, so it belongs to the bin at zero
    below = [np.cumsum(seen.exponents.counts.sum(axis=1)) for seen in tensors]
    starts = [  # no more than `TAIL` of the values are below
        seen.exponents.lowest + int(np.searchsorted(counts, TAIL * counts[-1], "right"))
        for seen, counts in zip(tensors, below, strict=True)
    ]
    lowest = max(LOWEST_EXPONENT + 1, min(starts))
    signs = sum(any(seen.exponents.counts[:, sign].any() for seen in tensors) for sign in (0, 1))
    step = math.ceil((highest + 1 - lowest) / (MAX_BINS // signs)) or 1
    return [*range(lowest, highest + 1, step), highest + 1]


def binned(seen: TensorStatistics, starts: Sequence[int]) -> list[int]:
    """Return how many values each bin of `bin_starts` holds, the most negative first."""
    rows = np.zeros((len(starts), 2), dtype=np.int64)
    for exponent, counts in enumerate(seen.exponents.counts, seen.exponents.lowest):
        rows[np.searchsorted(starts[:-1], exponent, "right")] += counts
    return [*rows[::-1, 0].tolist(), seen.zero_count, *rows[:, 1].tolist()]


def bar(part: float, ink: str) -> str:
    """Return a bar of `part` times `BAR` characters; something that is not nothing is seen."""
    whole, rest = divmod(math.ceil(part * BAR * len(ink)), len(ink))
    return ink[-1] * whole + (ink[rest - 1] if rest else "")


def _numbers(panels: Iterable[Panel]) -> list[str]:
    rows = [["", "mean", "std", "min", "max", "zeros", "dead", "NaN", "inf", "dtype", "shape"]]
    for title, seen in panels:
        numbers = map(number, (seen.mean, seen.std, seen.min, seen.max))
        shares = map(percent, (seen.zero_fraction, seen.dead_fraction))
        counts = (f"{count:,}" for count in (seen.nan_count, seen.inf_count))
        rows.append([title, *numbers, *shares, *counts, seen.dtype, shape(seen.shape)])
    return table(rows, left=(0, 9, 10))
