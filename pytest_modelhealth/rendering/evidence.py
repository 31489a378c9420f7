"""The culprit's values beside those of the layer before it, as text histograms."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pytest_modelhealth.checks.facts import leaves
from pytest_modelhealth.rendering.document import WIDTH, Document, Row
from pytest_modelhealth.rendering.notation import (
    Column,
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

MAX_BINS = 10  # of both signs, besides zero and a bin of the smallest values for each sign
TAIL = 0.01  # of the values are in the bin at the small end, so that the bulk is seen finely
BAR = 26
BLOCKS = "▏▎▍▌▋▊▉█"


class Exhibit(NamedTuple):
    """The worst violation's layer and the one computed just before it."""

    violation: Finding  # the worst violation
    culprit: LayerRecord  # its layer
    # the layer before it that the violation names as evidence, else the layer without children that
    # computed the same role just before; gradients are computed from the last layer to the first,
    # so for them it is the next layer. ``None`` where no such layer was observed
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
    is_backward = role in ("gradients", "parameter_gradients")
    nearest, at = math.inf, math.nan if culprit.entered is None else culprit.entered
    for record in leaves(report.observation):
        if record.entered is not None and record.tensors(role):
            distance = record.entered - at if is_backward else at - record.entered
            is_part = is_backward and is_inside(record.name, culprit.name)
            if 0 < distance < nearest and not is_part:
                nearest, alone = distance, alone._replace(predecessor=record)
    return alone


def render(report: HealthReport) -> str:
    """Return both histograms side by side in at most 100 columns, and a line of numbers for each.

    A bin holds the values of one sign between two powers of two. Bars are of ``#`` where standard
    output cannot encode blocks.
    """
    exhibit = culprit_and_predecessor(report)
    if exhibit is None:
        return headline(report)
    culprit, before = printable(exhibit.culprit.label), exhibit.predecessor
    beside = "" if before is None else f", beside {printable(before.label)} computed just before"
    panels = [
        (abbreviate(printable(record.label), BAR), seen)
        for record in (before, exhibit.culprit)
        if record is not None and (seen := exhibit.statistics(record))
    ]
    remarks = [f"{title}: bins counted on a sample" for title, s in panels if s.histogram_sampled]
    if exhibit.statistics(exhibit.culprit) is None:
        remarks.append(printable(exhibit.culprit.why_not_seen(exhibit.role)))
    return Document(
        f"{exhibit.role.replace('_', ' ')} of {culprit} ({exhibit.violation.check}){beside}",
        columns=[
            Column(""),
            *(Column(t, is_text=True) for title, _ in panels for t in (title, "")),
        ],
        rows=[*_histograms([seen for _, seen in panels])] if panels else [],
        code=_numbers(panels) if panels else [],
        remarks=remarks if panels else ["", *remarks],
    ).text(width=WIDTH)


def _histograms(tensors: Sequence[TensorStatistics]) -> Iterator[Row]:
    """Yield a row a bin, from the first filled one to the last, zeros, and what is not finite."""
    try:
        BLOCKS.encode(getattr(sys.stdout, "encoding", None) or "utf-8")
        ink = BLOCKS
    except (UnicodeEncodeError, LookupError):
        ink = "#"
    starts = bin_starts(tensors)
    counts = np.array([[*binned(seen, starts), seen.nonfinite_count] for seen in tensors])
    parts = counts / np.array([[max(1, seen.count)] for seen in tensors])
    edges = [*map(power_of_two, starts)]
    positive = [f"{low} .. {high}" for low, high in pairwise(["0", *edges])]
    negative = [f"-{high} .. {f'-{low}' if low else 0}" for low, high in pairwise(["", *edges])]
    filled = [*np.flatnonzero(counts[:, :-1].any(axis=0)).tolist(), len(positive)]
    for at, name in enumerate([*negative[::-1], "zero", *positive, "NaN, inf"]):
        if min(filled) <= at <= max(filled) or (
            at == 2 * len(positive) + 1 and counts[:, -1].any()
        ):
            cells = [name]
            for part in parts[:, at]:
                share = percent(part) if part else ""
                cells += [bar(part / (parts.max() or 1.0), ink).ljust(BAR), f"{share:>4} "]
            yield Row(cells)


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


def _numbers(panels: Iterable[tuple[str, TensorStatistics]]) -> list[str]:
    rows = [["", "mean", "std", "min", "max", "zeros", "dead", "NaN", "inf", "dtype", "shape"]]
    for title, seen in panels:
        numbers = map(number, (seen.mean, seen.std, seen.min, seen.max))
        shares = map(percent, (seen.zero_fraction, seen.dead_fraction))
        counts = (f"{count:,}" for count in (seen.nan_count, seen.inf_count))
        rows.append([title, *numbers, *shares, *counts, seen.dtype, shape(seen.shape)])
    return table(rows, left=(0, 9, 10))
