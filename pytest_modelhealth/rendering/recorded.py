"""What a test made, as the plain data of the file of a run: `docs/reference/run-format.md` has it.

Charts are drawn of the same data, on the page of a run as in a figure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from operator import attrgetter
from typing import Any

import networkx as nx
import numpy as np

from pytest_modelhealth.comparison.comparison import AlignedLayer, Comparison, differs
from pytest_modelhealth.comparison.results import TensorResult
from pytest_modelhealth.rendering.diagram import Diagram, diagram
from pytest_modelhealth.rendering.json import plain
from pytest_modelhealth.rendering.margins import margins
from pytest_modelhealth.rendering.model_summary import summarised
from pytest_modelhealth.rendering.places import called_at, defined_at
from pytest_modelhealth.rendering.summary import headline, label
from pytest_modelhealth.report import (
    ROLES,
    HealthReport,
    LayerRecord,
    Verdict,
    Violation,
)
from pytest_modelhealth.report.ranks import Ranks
from pytest_modelhealth.settings.setting import is_inside
from pytest_modelhealth.snapshot.changes import phrases
from pytest_modelhealth.snapshot.drift import Outcome, SnapshotCheck
from pytest_modelhealth.snapshot.drift import summary as drift_summary
from pytest_modelhealth.snapshot.snapshot import Snapshot
from pytest_modelhealth.statistics import TensorStatistics


def record(result: HealthReport | Comparison | SnapshotCheck, place: str) -> dict[str, Any]:
    """Return a result by the keys of the file of a run; numbers that are not finite are ``None``.

    Args:
        result: what a test made.
        place: ``path:line`` of the line that made it.
    """
    if isinstance(result, Comparison):
        made = comparison_data(result)
    elif isinstance(result, SnapshotCheck):
        made = _drift(result)
    else:
        with result._as_asked._unasked():
            made = _inspection(result._as_asked)
    return {"kind": made.pop("kind"), "place": place, **plain(made)}


def _fields(of: object, names: str) -> dict[str, Any]:
    """Return attributes by their names, ``key:name`` where the file calls one otherwise."""
    pairs = (name.partition(":") for name in names.split())
    return {key: attrgetter(name or key)(of) for key, _, name in pairs}


# An inspection


SIZES = ("parameter_bytes", "activation_bytes", "multiply_adds", "saved_bytes")
"""What a layer costs, by its name in `ModelSummary`."""


def _inspection(report: HealthReport) -> dict[str, Any]:
    seen, judgement = report.observation, report._judgement
    verdict = judgement.verdict
    of = "batch" if seen.stepped is None else "step"
    of = of if seen.course is None else "training"
    summary = summarised(report)
    costs = {row["name"]: row for row in summary.rows}
    layers = [_layer(report, record, costs[record.name]) for record in report]
    return {
        "kind": "inspection",
        "of": of,
        "verdict": verdict.value,
        "headline": headline(report),
        "text": "" if verdict is Verdict.HEALTHY else report.render("failure"),
        **_fields(seen, "model:model_type loss samples batches backward notes"),
        "part": None if seen.part is None else asdict(seen.part),
        "ranks": None if seen.ranks is None else _ranks(seen.ranks),
        "violations": findings_data(report),
        "warnings": [_finding(report, found) for found in judgement.warned],
        "inconclusive": [
            _where(report, found) | _fields(found, "reason") for found in judgement.inconclusive
        ],
        "waived": [
            _where(report, found) | _fields(found, "message") | _fields(waiver, "reason")
            for found, waiver in judgement.waived
        ],
        "margins": [
            {
                **_where(report, near.violation),
                "role": near.violation.role,
                "value": float(near.violation.value),
                **_fields(near, "limit setting used least:is_least"),
            }
            for near in margins(report)
        ],
        "totals": {key: summary.totals[key] for key in TOTALS},
        "layers": layers,
        "flow": flow_data(report),
        "course": _course(report),
    }


def _where(report: HealthReport, found: Any) -> dict[str, Any]:
    return {**_fields(found, "check layer"), "label": label(report, found.layer)}


def findings_data(report: HealthReport) -> list[dict[str, Any]]:
    """Return what fails, the gravest first."""
    return [_finding(report, found) for found in report._judgement.violations]


def _finding(report: HealthReport, found: Violation) -> dict[str, Any]:
    others = [_where(report, other) | _fields(other, "message") for other in found.folded]
    return {
        **_where(report, found),
        **_fields(found, "role tensor limit origin message cause details"),
        "value": float(found.value),
        "affected": found.layers[1:],
        "consequences": others,
        **_places(report, found.layer),
    }


def _places(report: HealthReport, layer: str) -> dict[str, str]:
    return {"defined_at": defined_at(report, layer), "called_at": called_at(report, layer)}


TOTALS = ("layers", "parameters", "trainable", *SIZES, "peak_bytes")
"""What is said of the model as a whole, by its name in `ModelSummary`."""


def _layer(report: HealthReport, record: LayerRecord, costs: Mapping[str, Any]) -> dict[str, Any]:
    given, made = record.inputs, record.activations
    where = "batch sample rank"
    unknown = {"shape": None, "dtype": "", "device": ""}
    return {
        "label": label(report, record.name),
        **_fields(record, "type:type_name status:status.value"),
        **_fields(record, "name reason functional calls tied"),
        "input_shape": None if given is None else given.shape,
        **(unknown if made is None else _fields(made, "shape dtype device")),
        "parameters": costs["parameters"] or 0,
        "trainable": costs["trainable"] or 0,
        **{size: costs[size] for size in SIZES},
        **_places(report, record.name),
        "largest": {role: _fields(one, where) for role, one in record.largest.items()},
        "nonfinite": {role: _fields(one, where) for role, one in record.nonfinite.items()},
        "assembled": {role: asdict(found) for role, found in record.assembled.items()},
        "tensors": tensors_data(record),
    }


def tensors_data(record: LayerRecord, role: str | None = None) -> list[dict[str, Any]]:
    """Return the tensors of a layer, or those in one role."""
    return [
        tensor_data(each, name, seen)
        for each in ROLES
        if role in (None, each)
        for name, seen in record.tensors(each).items()
    ]


def _ranks(found: Ranks) -> dict[str, Any]:
    """Return who took part; in what they disagree, the findings say."""
    return {
        **_fields(found, "ranks engine"),
        "groups": [asdict(group) for group in found.groups],
        "losses": [{"loss": loss, "rank": rank} for loss, rank in found.losses],
    }


def tensor_data(role: str, name: str, seen: TensorStatistics) -> dict[str, Any]:
    """Return the statistics of a tensor."""
    counts = seen.exponents.counts
    return {
        "role": role,
        "name": name,
        **_fields(seen, "nan:nan_count inf:inf_count zeros:zero_count dead:dead_fraction"),
        **_fields(seen, "shape dtype count mean std min max norm"),
        "bins": {
            "lowest": seen.exponents.lowest,
            "negative": counts[:, 0].tolist(),
            "positive": counts[:, 1].tolist(),
            "sampled": seen.histogram_sampled,
        },
    }


# Who feeds whom


def flow_data(report: HealthReport) -> dict[str, Any] | None:
    """Return a report's flow; ``None`` where none was recorded."""
    drawn = diagram(report, most_boxes=1 << 30)
    if drawn is None or report.flow is None:
        return None
    names = {
        box.key: f"{box.label} #{box.key}" if box.kind == "join" else box.key for box in drawn.boxes
    }
    edges = [
        [names[arrow.source], names[arrow.target], arrow.passes_gradient, arrow.label.split()]
        for arrow in drawn.arrows
    ]
    violations = report._judgement.violations
    way = _way(drawn, violations[0].layer) if violations else []
    return {
        "edges": edges,
        "joins": [names[box.key] for box in drawn.boxes if box.kind == "join"],
        "way": [names[key] for key in way],
        "exact": report.flow.is_exact,
    }


def _way(drawn: Diagram, culprit: str) -> list[str]:
    """Return the shortest way from the batch through the culprit, or the first layer inside it."""
    inside = (box.key for box in drawn.boxes if box.key == culprit or is_inside(box.key, culprit))
    through = next(inside, None)
    if through is None:
        return []
    graph = nx.DiGraph((arrow.source, arrow.target) for arrow in drawn.arrows)
    graph.add_node(through)
    halves = []
    for ways, kind in ((graph.reverse(copy=False), "source"), (graph, "end")):
        ends = {box.key for box in drawn.boxes if box.kind == kind}
        found = nx.single_source_shortest_path(ways, through)
        halves.append(next((way for name, way in found.items() if name in ends), [through]))
    return [*reversed(halves[0]), *halves[1][1:]]


# A training

MOST_STEPS, MOST_LAYERS = 256, 32
"""Of more layers, those that something is found in come before the others."""

SHOWN = (
    "activation_rms",
    "gradient_norm",
    "parameter_gradient_norm",
    "update_ratio",
    "dead_fraction",
)


def _course(report: HealthReport) -> dict[str, Any] | None:
    """Return the steps of a monitored training, thinned to what a page can show."""
    history = report._history
    if history is None or not len(history):
        return None
    judgement = report._judgement
    accused = [found.layer for found in (*judgement.violations, *judgement.warned)]
    names = list(dict.fromkeys((*(n for n in accused if n in history.layers), *history.layers)))
    every = -(-len(history) // MOST_STEPS)
    taken = sorted({*range(0, len(history), every), len(history) - 1})

    def values(layer: str, statistic: str) -> list[float]:
        found = history[layer, statistic][taken]
        kind = statistic.rpartition("_")[0]
        if kind in ("activation", "gradient", "parameter_gradient"):
            found = np.where(history[layer, f"{kind}_nonfinite"][taken] > 0, math.nan, found)
        shown: list[float] = found.tolist()
        return shown

    return {
        "steps": history.steps[taken].tolist(),
        "loss": history.loss[taken].tolist(),
        "layers": {
            name: {statistic: values(name, statistic) for statistic in SHOWN}
            for name in names[:MOST_LAYERS]
        },
    }


# A comparison


def comparison_data(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison; it asks for no verdict."""
    found = comparison.first_divergence
    is_different = differs(comparison)
    show = comparison._renderer
    names = "layer candidate label kind story cause affected"
    return {
        "kind": "comparison",
        "verdict": "different" if is_different else "equivalent",
        "headline": show("comparison", "line")(comparison),
        "text": show("comparison", "failure")(comparison) if is_different else "",
        **_fields(comparison, "model:reference candidate"),
        "divergence": None if found is None else _fields(found, names),
        **_fields(comparison, "losses basis notes"),
        "layers": [*map(_aligned, comparison.layers.values()), *_outputs(comparison.outputs)],
    }


def _aligned(layer: AlignedLayer) -> dict[str, Any]:
    return {
        **_fields(layer.pair, "reference candidate"),
        **_fields(layer, "label diverged changed_parameters type:type_name"),
        **_fields(layer, "change:pair.change.value"),
        "tensors": [_compared(result) for result in layer.tensors],
    }


_MEASURES = "error:relative_l2 reference:expected max_abs max_ulp cosine found at"


def _compared(result: TensorResult) -> dict[str, Any]:
    names = (name.partition(":")[0] for name in _MEASURES.split())
    found = result.difference
    return {
        **_fields(result.key, "role name:tensor"),
        **(dict.fromkeys(names) if found is None else _fields(found, _MEASURES)),
        **_fields(result, "noise ratio limit source diverged problem"),
    }


def _outputs(outputs: Iterable[TensorResult]) -> list[dict[str, Any]]:
    """Return what the models return as a last layer, if it was compared."""
    tensors = [_compared(result) for result in outputs]
    last = {
        "reference": "",
        "candidate": "",
        "label": "output",
        "type": "",
        "change": "matched",
        "diverged": any(tensor["diverged"] for tensor in tensors),
        "changed_parameters": [],
        "tensors": tensors,
    }
    return [last] if tensors else []


# A check of a snapshot


def _drift(check: SnapshotCheck) -> dict[str, Any]:
    """Return what a snapshot check found."""
    found = check.found
    drifted = found is not None and found.drifted
    moved = "layer label role statistic before now distance moved allowed:allowance.distance"
    return {
        "kind": "drift",
        "verdict": check.outcome.value,
        "headline": _drift_headline(check),
        **_fields(check, "text model:now.model snapshot:file"),
        "tensors": 0 if found is None else found.tensors,
        "story": "" if found is None else found.story,
        "drifts": [] if found is None else [_fields(drift, moved) for drift in found.drifts],
        "changes": [] if found is None else phrases(found.changes),
        "before": _layers(check.before) if drifted and check.before is not None else [],
        "now": _layers(check.now) if drifted else [],
    }


def _drift_headline(check: SnapshotCheck) -> str:
    found = check.found
    if found is not None and found.drifted:
        return drift_summary(found)
    recorded = f"recorded in {check.file}" if check.outcome is Outcome.RECORDED else ""
    told = check.outcome.value if found is None else str(found)
    return check.text.partition("\n")[0] or recorded or told


_OF_TENSOR = "shape dtype mean std min max zeros dead nan inf"


def _layers(snapshot: Snapshot) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            **_fields(line, "type status calls"),
            "tensors": [
                {"role": role, "name": own, **_fields(tensor, _OF_TENSOR)}
                for (role, own), tensor in line.tensors.items()
            ],
        }
        for name, line in snapshot.layers.items()
    ]
