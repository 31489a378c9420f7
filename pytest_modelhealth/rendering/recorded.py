"""What a test made, as the plain data of the file of a run: `docs/reference/run-format.md` has it.

Charts are drawn of the same data, on the page of a run as in a figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import networkx as nx
import numpy as np

from pytest_modelhealth.alignment.result import Change, Pair
from pytest_modelhealth.comparison.comparison import AlignedLayer, Comparison
from pytest_modelhealth.comparison.results import TensorResult
from pytest_modelhealth.rendering import failure
from pytest_modelhealth.rendering.data import finding_data
from pytest_modelhealth.rendering.diagram import Edge, diagram
from pytest_modelhealth.rendering.document import WIDTH
from pytest_modelhealth.rendering.evidence import culprit_and_predecessor
from pytest_modelhealth.rendering.model_summary import summarised
from pytest_modelhealth.rendering.places import defined_at
from pytest_modelhealth.rendering.summary import headline, label, notes
from pytest_modelhealth.report import ROLES, Finding, HealthReport, LayerRecord, Verdict
from pytest_modelhealth.report.codec import encode
from pytest_modelhealth.settings.setting import is_inside
from pytest_modelhealth.snapshot.changes import phrases
from pytest_modelhealth.snapshot.drift import Outcome, SnapshotCheck
from pytest_modelhealth.statistics import TensorStatistics

if TYPE_CHECKING:
    from pytest_modelhealth.training.monitoring.history import History


def record(result: HealthReport | Comparison | SnapshotCheck, place: str) -> dict[str, Any]:
    """Return a result by the keys of the file of a run; numbers that are not finite are ``None``.

    `place` is ``path:line`` of the line that made it.
    """
    if isinstance(result, Comparison):
        made = comparison_data(result)
    elif isinstance(result, SnapshotCheck):
        made = _drift(result)
    else:
        with result._as_asked._unasked():
            made = _inspection(result._as_asked)
    return {"kind": made.pop("kind"), "place": place, **encode(made)}


def _fields(of: object, *names: str, **paths: str) -> dict[str, Any]:
    """Return attributes by their names, or by others for a path to them; ``None`` of nothing."""
    known = dict(zip(names, names, strict=True)) | paths
    return {key: None if of is None else attrgetter(path)(of) for key, path in known.items()}


# An inspection


# what a model is made of and what a layer costs, by their names in `ModelSummary`
COUNTS = ("layers", "parameters", "trainable")
SIZES = ("parameter_bytes", "activation_bytes", "multiply_adds", "saved_bytes")


def _inspection(report: HealthReport) -> dict[str, Any]:
    seen, judgement = report.observation, report._judgement
    verdict = judgement.verdict
    summary = summarised(report)
    costs = {row["name"]: row for row in summary.rows}
    layers = [_layer(report, record, costs[record.name]) for record in report]
    return {
        "kind": "inspection",
        "of": "training" if seen.course else "step" if seen.stepped else "batch",
        "verdict": verdict.value,
        "headline": headline(report),
        "text": "" if verdict is Verdict.HEALTHY else failure.render(report, width=WIDTH),
        **_fields(seen, "loss", "samples", "batches", "backward", "part", "ranks"),
        "notes": notes(report),
        "model": seen.model_type,
        "violations": findings_data(report),
        "warnings": [_finding(report, found) for found in judgement.warned],
        "inconclusive": [_finding(report, found) for found in judgement.inconclusive],
        "waived": [
            _finding(report, found) | {"reason": found.waiver.reason}
            for found in judgement.waived
            if found.waiver
        ],
        "totals": {key: summary.totals[key] for key in (*COUNTS, *SIZES, "peak_bytes")},
        "evidence": evidence_data(report),
        "layers": layers,
        "flow": flow_data(report),
        "course": _course(report),
    }


def findings_data(report: HealthReport) -> list[dict[str, Any]]:
    """Return what fails, the gravest first."""
    return [_finding(report, found) for found in report._judgement.violations]


def _finding(report: HealthReport, found: Finding) -> dict[str, Any]:
    data = finding_data(report, found) | {"label": label(report, found.layer)}
    keys = ("check", "layer", "message")
    data["consequences"] = [
        {key: one[key] for key in keys} | {"label": label(report, one["layer"])}
        for one in data.pop("folded")
    ]
    return data | {"affected": found.layers[1:]}


def _layer(report: HealthReport, record: LayerRecord, costs: Mapping[str, Any]) -> dict[str, Any]:
    made = record.activations
    return {
        "label": label(report, record.name),
        **_fields(record, "name", "status", "reason", "functional", "calls", type="type_name"),
        **_fields(record, "tied", "largest", "nonfinite", "ill_ranks"),
        **_fields(record.inputs, input_shape="shape"),
        **_fields(made, "shape"),
        "dtype": "" if made is None else made.dtype,
        "device": "" if made is None else made.device,
        **{size: costs[size] or 0 for size in ("parameters", "trainable")},
        **{size: costs[size] for size in SIZES},
        "defined_at": defined_at(report, record.name),
        "called_at": report.observation.called_at(record.name),
        "tensors": tensors_data(record),
    }


def tensors_data(record: LayerRecord) -> list[dict[str, Any]]:
    """Return the tensors of a layer."""
    return [
        tensor_data(role, name, seen)
        for role in ROLES
        for name, seen in record.tensors(role).items()
    ]


def tensor_data(role: str, name: str, seen: TensorStatistics) -> dict[str, Any]:
    """Return the statistics of a tensor."""
    counts = seen.exponents.counts
    moments = _fields(seen, "shape", "dtype", "count", "mean", "std", "min", "max", "norm")
    shares = _fields(
        seen, nan="nan_count", inf="inf_count", zeros="zero_count", dead="dead_fraction"
    )
    bins = _fields(seen, lowest="exponents.lowest", sampled="histogram_sampled")
    bins |= {"negative": counts[:, 0].tolist(), "positive": counts[:, 1].tolist()}
    return {"role": role, "name": name, **shares, **moments, "bins": bins}


def evidence_data(report: HealthReport) -> list[dict[str, Any]]:
    """Return the tensor that the verdict rests on, after that of the layer before, if any."""
    exhibit = culprit_and_predecessor(report)
    if exhibit is None or exhibit.statistics(exhibit.culprit) is None:
        return []
    return [
        {"label": record.label, **tensor_data(exhibit.role, "", seen)}
        for record in (exhibit.predecessor, exhibit.culprit)
        if record is not None and (seen := exhibit.statistics(record))
    ]


# Who feeds whom


def flow_data(report: HealthReport) -> dict[str, Any] | None:
    """Return a report's flow; ``None`` where none was recorded."""
    if report.flow is None or not report.flow.graph.vertices:
        return None
    edges, kinds = diagram(report.flow)
    violations = report._judgement.violations
    return {
        "edges": edges,
        "joins": [name for name, kind in kinds.items() if kind == "join"],
        "way": _way(edges, kinds, violations[0].layer) if violations else [],
        "exact": report.flow.is_exact,
    }


def _way(edges: list[Edge], kinds: dict[str, str], culprit: str) -> list[str]:
    """Return the shortest way from the batch through the culprit, or the first layer inside it."""
    through = next((n for n in kinds if n == culprit or is_inside(n, culprit)), None)
    if through is None:
        return []
    graph = nx.DiGraph((source, target) for source, target, *_ in edges)
    graph.add_node(through)
    halves = []
    for one, kind in ((graph.reverse(copy=False), "source"), (graph, "end")):
        ways = nx.single_source_shortest_path(one, through)
        halves.append(next((way for name, way in ways.items() if kinds[name] == kind), [through]))
    return [*reversed(halves[0]), *halves[1][1:]]


# A training

# of more layers, those that something is found in come before the others
MOST_STEPS, MOST_LAYERS = 256, 32

SHOWN = (
    "activation_rms", "gradient_norm", "parameter_gradient_norm", "update_ratio", "dead_fraction"
)  # fmt: skip


def _course(report: HealthReport) -> dict[str, Any] | None:
    """Return the steps of a monitored training, thinned to what a page can show."""
    history = report._history
    if history is None or not len(history):
        return None
    judgement = report._judgement
    accused = {found.layer for found in (*judgement.violations, *judgement.warned)}
    layers = sorted(enumerate(history.layers), key=lambda one: one[1] not in accused)
    listed = sorted(at for at, _ in layers[:MOST_LAYERS])
    every = -(-len(history) // MOST_STEPS)
    taken = sorted({*range(0, len(history), every), len(history) - 1})
    return course_data(history, SHOWN, listed, taken)


def course_data(
    history: History, statistics: Iterable[str], layers: Iterable[int], steps: Sequence[int]
) -> dict[str, Any]:
    """Return what is drawn of a training; infinity stands for what was not finite."""
    values = {}
    for name in statistics:
        own = history[name]
        is_bad = np.isinf(own) | _is_of_bad(history, name, own)
        values[name] = np.where(is_bad, np.inf, own)[steps]
    return {
        "steps": history.steps[steps].tolist(),
        "loss": [x if math.isfinite(x) else None for x in history.loss[steps].tolist()],
        "layers": {
            history.layers[at]: {name: own[:, at].tolist() for name, own in values.items()}
            for at in layers
        },
    }


def _is_of_bad(history: History, statistic: str, values: Any) -> Any:
    """Return where a statistic over steps and layers is of numbers that were not finite."""
    if statistic == "update_ratio":
        after = history["parameter_nonfinite"] > 0
        last = history["parameter_gradient_nonfinite"][-1:] > 0
        return after | (np.isnan(values) & np.concatenate([after[1:], last]))
    if statistic == "dead_fraction":
        return (history["activation_nonfinite"] > 0) & ~np.isnan(values)
    return history[f"{statistic.rpartition('_')[0]}_nonfinite"] > 0


# A comparison


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison; it asks for no verdict."""
    found = comparison.first_divergence
    is_different = found is not None
    why = ": ".join(filter(None, (found.story, found.cause))) if found else ""
    show = comparison._renderer
    layers = [*map(_aligned, comparison.layers.values())]
    if comparison.outputs:  # what the models return is the last
        returned = AlignedLayer(Pair("", "", Change.MATCHED), "", comparison.outputs)
        layers.append(_aligned(returned) | {"label": "output"})
    return {
        "kind": "comparison",
        "verdict": "different" if is_different else "equivalent",
        "headline": show("comparison", "line")(comparison),
        "text": show("comparison", "failure")(comparison, WIDTH) if is_different else "",
        **_fields(comparison, "candidate", "losses", "basis", "notes", model="reference"),
        "violations": [_parting("comparison", found.layer, why, found.label)] if found else [],
        "divergence": found,
        "layers": layers,
    }


def _parting(kind: str, layer: str, message: str, label: str) -> dict[str, Any]:
    return {**encode(Finding(kind, layer, message=message)), "label": label}


def _aligned(layer: AlignedLayer) -> dict[str, Any]:
    return {
        **_fields(layer.pair, "reference", "candidate", "change"),
        **_fields(layer, "label", "diverged", "changed_parameters", type="type_name"),
        "tensors": [_compared(result) for result in layer.tensors],
    }


def _compared(result: TensorResult) -> dict[str, Any]:
    measures = ("max_abs", "found", "at")
    return {
        **_fields(result.difference, *measures, error="relative_l2", reference="expected"),
        **_fields(result, "noise", "ratio", "limit", "source", "diverged", "problem"),
        **_fields(result, role="key.role", name="key.tensor"),
    }


# A check of a snapshot


def _drift(check: SnapshotCheck) -> dict[str, Any]:
    """Return what a snapshot check found."""
    found, model = check.found, check.now.observation.model_type
    drifts, story = ((), "") if found is None else (found.drifts, found.story)
    recorded = f"recorded in {check.file}" if check.outcome is Outcome.RECORDED else ""
    line = check.text.partition("\n")[0] or recorded or str(found or check.outcome.value)
    if found is not None and found.drifted:
        line = found.headline
    culprit = drifts[0].layer if drifts else ""
    parting = _parting("drift", culprit, story or line, culprit or (model if drifts else ""))
    fails = check.outcome in (Outcome.DRIFTED, Outcome.MISSING)
    return {
        "kind": "drift",
        "verdict": check.outcome.value,
        "headline": line,
        "text": check.text,
        "model": model,
        "violations": [parting] if fails else [],
        "snapshot": check.file,
        "tensors": 0 if found is None else found.tensors,
        "story": story,
        "drifts": [
            encode(drift) | {"moved": drift.moved, "allowed": drift.allowance.distance}
            for drift in drifts
        ],
        "changes": [] if found is None else phrases(found.changes),
    }
