"""The figures of a report and a comparison: the charts of the page, in matplotlib."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase

from matplotlib.figure import Figure

from pytest_modelhealth.comparison.comparison import Comparison
from pytest_modelhealth.errors import InspectionError, LayerNotFoundError, suggest_layer
from pytest_modelhealth.removal.result import RemovableUnits
from pytest_modelhealth.rendering.charts import flow as flow_chart
from pytest_modelhealth.rendering.charts.rows import depth, errors
from pytest_modelhealth.rendering.charts.values import histogram, histograms, units
from pytest_modelhealth.rendering.diagram import NO_FLOW
from pytest_modelhealth.rendering.evidence import culprit_and_predecessor
from pytest_modelhealth.rendering.figure import figure_of
from pytest_modelhealth.rendering.json import plain
from pytest_modelhealth.rendering.notation import number, percent, plural, printable, shape
from pytest_modelhealth.rendering.recorded import (
    comparison_data,
    findings_data,
    flow_data,
    tensor_data,
    tensors_data,
)
from pytest_modelhealth.rendering.removable import line
from pytest_modelhealth.rendering.summary import label
from pytest_modelhealth.report import HealthReport, LayerRecord
from pytest_modelhealth.statistics import TensorStatistics

FLOWING = ("activations", "gradients", "parameter_gradients")
MOST_ALARMS = 4
"""Findings that are written above a figure."""


def figures(made: HealthReport | Comparison) -> dict[str, Figure]:
    """Return the figures that explain a verdict, by name; only those there is something for.

    Of a report ``culprit`` and ``predecessor`` are histograms in the role that is violated, and
    ``gradient_flow`` shows the whole model.
    """
    if isinstance(made, Comparison):
        return {"error_depth": plot_errors(made)}
    drawn: dict[str, Figure] = {}
    found = culprit_and_predecessor(made)
    for name in ("culprit", "predecessor") if found else ():
        record = getattr(found, name)
        seen = record and found and found.statistics(record)
        if found and seen:
            drawn[name] = _histogram(made, record, seen, found.role)
    if any(record.tensors(role) for record in made for role in FLOWING[1:]):
        drawn["gradient_flow"] = plot_gradient_flow(made)
    return drawn


def plot_histogram(report: HealthReport, layer: str, what: str = "activations") -> Figure:
    """Return a figure of one layer's values by sign and power of two.

    Several tensors of a role are merged.
    """
    record = report[layer]
    seen = record.statistics(what)
    if seen is None:
        raise InspectionError(record.why_not_seen(what))
    return _histogram(report, record, seen, what)


def _histogram(
    report: HealthReport, record: LayerRecord, seen: TensorStatistics, what: str
) -> Figure:
    parts = {
        "min": number(seen.min),
        "max": number(seen.max),
        "L2 norm": number(math.nan if seen.count and not seen.finite_count else seen.norm),
        "zeros": percent(seen.zero_fraction),
    }
    said = [
        f"{record.type_name}, {seen.dtype}, {shape(seen.shape)}, {plural(seen.count, 'value')}",
        "   ".join(f"{name} {text}" for name, text in parts.items() if text != "-"),
    ]
    found = [f for f in report.violations if (f.layer, f.role) == (record.name, what)]
    alarms = [f"{f.check}: {f.message}" for f in found]
    title = f"{record.label}: {what.replace('_', ' ')}"
    chart = histogram(plain(tensor_data(what, "", seen)))
    return figure_of(chart, title, said, alarms[:MOST_ALARMS], scale=1.6)


def plot_histograms(report: HealthReport, pattern: str = "*", what: str = "activations") -> Figure:
    """Return a figure with a row for each layer that matches `pattern`, in execution order.

    The rows share the axis of values; each is scaled to its own highest bar. How many matching
    layers have nothing in role `what` is said below.
    """
    if not isinstance(pattern, str):
        raise InspectionError(
            f"the pattern of layers must be a shell wildcard such as 'encoder.*', not {pattern!r}"
        )
    matched = [record for record in report if fnmatchcase(record.name, pattern)]
    if not matched:
        nearest = suggest_layer(pattern, report.layers)
        raise LayerNotFoundError(f"no layer matches {pattern!r}{nearest} report.layers lists all.")
    seen = [(record, found) for record in matched if (found := record.statistics(what)) is not None]
    if not seen:
        raise InspectionError(matched[0].why_not_seen(what))
    rest, role = len(matched) - len(seen), what.replace("_", " ")
    left_out = f"{plural(rest, 'matching layer')} without {role} left out" if rest else ""
    named = [(record.label, plain(tensor_data(what, "", found))) for record, found in seen]
    title = f"{role} of {report.observation.model_type}"
    return figure_of(histograms(named, left_out), title)


def plot_gradient_flow(report: HealthReport) -> Figure:
    """Return a figure of gradients through the depth of a model, beside the activations.

    A row is a layer that contains no other; a container is one only where it has parameters of its
    own or a violation. Norms are L2 norms of the finite values on a log scale; a norm of zero is
    drawn hollow at the left edge, a layer with NaN or infinity as a cross at the right.
    """
    if not any(record.tensors(role) for record in report for role in FLOWING[1:]):
        why = (
            "no layer of those watched has a gradient"
            if report.observation.backward
            else "no backward pass ran"
        )
        model = printable(report.observation.model_type)
        raise InspectionError(f"no gradients were seen of {model}: {why}.")
    layers = [
        {
            "name": record.name,
            "label": label(report, record.name),
            "tensors": [each for role in FLOWING for each in tensors_data(record, role)],
        }
        for record in report
    ]
    found = plain(findings_data(report))
    title = f"gradient flow of {report.observation.model_type}"
    return figure_of(depth(plain(layers), found, ""), title, (), _alarms(report))


def _alarms(report: HealthReport) -> list[str]:
    lines = [f"{label(report, f.layer)}: {f.check}: {f.message}" for f in report.violations]
    more = len(lines) - MOST_ALARMS
    return [*lines[:MOST_ALARMS], *[f"and {plural(more, 'violation')} more"] * (more > 0)]


def plot_flow(report: HealthReport) -> Figure:
    """Return a figure of who feeds whom; the way through the worst layer is lit.

    A dashed arrow lets no gradient back. A large model is folded into its containers.
    """
    found = flow_data(report)
    if found is None:
        compiled = 'code observed as compiled has none; inspect it with compiled="eager"'
        why = "; ".join(report.flow.notes if report.flow is not None else ())
        raise InspectionError(f"{NO_FLOW}: {why or compiled}")
    chart = flow_chart.flow(found, plain(findings_data(report)), "")
    return figure_of(chart, f"flow of {report.observation.model_type}", (), _alarms(report))


def plot_errors(comparison: Comparison) -> Figure:
    """Return a figure of relative L2 errors, forward and backward, the first layer at the top.

    The bar of a row ends where the noise times the factor does: up to there rounding explains an
    error. Rows that have diverged are tinted; the culprit's name is red. No error is drawn hollow
    at the left edge, what has no number (NaN, another shape, a missing gradient) as a cross at the
    right.
    """
    verdict = "equivalent" if comparison.equivalent else "not equivalent"
    title = f"{verdict}: {comparison.reference} and {comparison.candidate}"
    return figure_of(errors(plain(comparison_data(comparison)), ""), title)


def plot_removable(result: RemovableUnits) -> Figure:
    """Return a figure with a row for each layer, the first at the top.

    A row stands for all units of a layer, in their order from left to right; those that can go are
    coloured by why.
    """
    if not result.record.sizes:
        raise InspectionError(
            "there is nothing to draw: no linear layer or convolution inside the model ran, but "
            "those that give its outputs"
        )
    rows = []
    for name, size in result.record.sizes.items():
        layer, kinds = result.layers.get(name), {}
        if layer is not None:
            duplicates = [unit for unit, _ in layer.duplicates]
            kinds = {"inactive": layer.inactive, "duplicate": duplicates, "unread": layer.unread}
        going = 0 if layer is None else len(layer.removable)
        rows.append((name, size, f"{going:,} of {size:,}", kinds))
    return figure_of(units(rows), line(result))
