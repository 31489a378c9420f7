"""Gradient norms through the depth of a model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pytest_modelhealth.checks.facts import leaves
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.rendering.figure import (
    ACTIVATIONS,
    ALARM,
    FAINT,
    INK,
    PARAMETERS,
    model_name,
    name_layers,
    new_figure,
    set_title,
)
from pytest_modelhealth.rendering.summary import by_layer, norm
from pytest_modelhealth.report import HealthReport, LayerRecord, Violation

FLOWING = {
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
    violated = by_layer(report.violations)
    shown = {record.name for record in leaves(report.observation)} | set(violated)
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
        raise InspectionError(f"no gradients were seen of {model_name(report)}: {why}.")
    figure, axes = new_figure(9, 1.6 + 0.24 * len(records))
    flows = {role: _seen(records, role) for role in FLOWING}
    low, high = _decades([value for found in flows.values() for _, value, _ in found])
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    for role, found in flows.items():
        _draw(axes, role, found, low, high)
    name_layers(
        axes, report, records, [_checks(violated.get(record.name, ())) for record in records]
    )
    axes.grid(axis="x", color=FAINT, linewidth=0.6)
    axes.set_xlabel("L2 norm of the gradient of the loss", color=INK, fontsize=9)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8.5, labelcolor=INK)
    set_title(figure, f"gradient flow of {model_name(report)}")
    return figure


_Seen = tuple[int, float, bool]
"""A row of the figure, the norm there, and whether there is NaN or infinity."""


def _seen(records: Sequence[LayerRecord], role: str) -> list[_Seen]:
    return [
        (row, norm(seen), seen.nonfinite_count > 0)
        for row, record in enumerate(records)
        if (seen := record.statistics(role)) is not None
    ]


def _draw(axes: Axes, role: str, found: Sequence[_Seen], low: float, high: float) -> None:
    """Draw the norms; `low` and `high` are where zeros and what is not finite go."""
    name, color, marker = FLOWING[role]
    zero = [row for row, value, _ in found if value == 0]
    bad = [row for row, _, is_nonfinite in found if is_nonfinite]
    edge: dict[str, Any] = {"linestyle": "none", "clip_on": False, "zorder": 4, "markersize": 6}
    if found:
        rows, norms, _ = zip(*found, strict=True)
        drawable = [value if value > 0 else math.nan for value in norms]
        axes.plot(
            drawable, rows, color=color, marker=marker, markersize=4, linewidth=1,
            alpha=0.9, label=name, zorder=3,
        )  # fmt: skip
    if zero:
        axes.plot(
            [low] * len(zero), zero, marker=marker, markerfacecolor="white", color=color,
            label=f"{name}: zero", **edge,
        )  # fmt: skip
    if bad:
        # a cross of each kind, so that two in one row are both seen
        cross = "x" if role == "gradients" else "+"
        label = f"{name}: NaN or inf"
        axes.plot([high] * len(bad), bad, cross, color=ALARM, label=label, **edge)


def _checks(violations: Iterable[Violation]) -> str:
    return ", ".join(dict.fromkeys(violation.check for violation in violations))


def _decades(norms: Sequence[float]) -> tuple[float, float]:
    """Return limits that leave half a decade beside the smallest and the greatest norm."""
    powers = [math.log10(value) for value in norms if value > 0 and math.isfinite(value)] or [0.0]
    return 10 ** (min(powers) - 0.5), 10 ** (max(powers) + 0.5)
