"""The culprit's numbers beside those of the layer before it."""

from __future__ import annotations

import math
from typing import NamedTuple

from pytest_modelhealth.checks.facts import leaves
from pytest_modelhealth.rendering.document import WIDTH, Document, Row
from pytest_modelhealth.rendering.notation import (
    Column,
    abbreviate,
    number,
    percent,
    printable,
    shape,
)
from pytest_modelhealth.rendering.summary import headline
from pytest_modelhealth.report import ROLES, Finding, HealthReport, LayerRecord
from pytest_modelhealth.settings.setting import is_inside
from pytest_modelhealth.statistics import TensorStatistics


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
            if 0 < distance < nearest and not (
                is_backward and is_inside(record.name, culprit.name)
            ):
                nearest, alone = distance, alone._replace(predecessor=record)
    return alone


def render(report: HealthReport) -> str:
    """Return the numbers of both, a line each: the layer before, then the culprit."""
    exhibit = culprit_and_predecessor(report)
    if exhibit is None:
        return headline(report)
    culprit, before = printable(exhibit.culprit.label), exhibit.predecessor
    beside = "" if before is None else f", beside {printable(before.label)} computed just before"
    records = [record for record in (before, exhibit.culprit) if record is not None]
    rows = [Row(_numbers(r.label, s)) for r in records if (s := exhibit.statistics(r)) is not None]
    is_absent = exhibit.statistics(exhibit.culprit) is None
    return Document(
        f"{exhibit.role.replace('_', ' ')} of {culprit} ({exhibit.violation.check}){beside}",
        columns=[Column(title, is_text=title in _TEXTS) for title in _TITLES],
        rows=rows,
        remarks=["", printable(exhibit.culprit.why_not_seen(exhibit.role))] if is_absent else [],
    ).text(width=WIDTH)


_TITLES = ("", "mean", "std", "min", "max", "zeros", "dead", "NaN", "inf", "dtype", "shape")
_TEXTS = ("", "dtype", "shape")
_NAME = 26  # characters of a layer's name, at most


def _numbers(label: str, seen: TensorStatistics) -> list[str]:
    numbers = map(number, (seen.mean, seen.std, seen.min, seen.max))
    shares = map(percent, (seen.zero_fraction, seen.dead_fraction))
    counts = (f"{count:,}" for count in (seen.nan_count, seen.inf_count))
    name = abbreviate(printable(label), _NAME)
    return [name, *numbers, *shares, *counts, seen.dtype, shape(seen.shape)]
