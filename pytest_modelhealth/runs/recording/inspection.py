"""A report as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pytest_modelhealth.rendering.model_summary import summarised
from pytest_modelhealth.rendering.places import called_at, defined_at
from pytest_modelhealth.rendering.summary import headline, label
from pytest_modelhealth.report import (
    ROLES,
    Extreme,
    HealthReport,
    LayerRecord,
    Verdict,
    Violation,
)
from pytest_modelhealth.report.ranks import Ranks
from pytest_modelhealth.runs.recording.course import of_course
from pytest_modelhealth.runs.recording.flow import of_flow
from pytest_modelhealth.statistics import TensorStatistics

SIZES = ("parameter_bytes", "activation_bytes", "multiply_adds", "saved_bytes")
"""What a layer costs, by its name in `ModelSummary`."""


def of_inspection(report: HealthReport) -> dict[str, Any]:
    """Return a report by the keys of the file of a run; it asks for no verdict."""
    with report._unasked():
        return _of(report)


def _of(report: HealthReport) -> dict[str, Any]:
    seen, judgement = report.observation, report._judgement
    verdict = judgement.verdict
    summary = summarised(report)
    costs = {row["name"]: row for row in summary.rows}
    layers = [_layer(report, record, costs[record.name]) for record in report]
    return {
        "kind": "inspection",
        "of": _of_what(report),
        "verdict": verdict.value,
        "headline": headline(report),
        "text": "" if verdict is Verdict.HEALTHY else report.render("failure"),
        "model": seen.model_type,
        "loss": seen.loss,
        "samples": seen.samples,
        "batches": seen.batches,
        "part": None if seen.part is None else asdict(seen.part),
        "ranks": None if seen.ranks is None else _ranks(seen.ranks),
        "backward": seen.backward,
        "notes": seen.notes,
        "violations": [_finding(report, found) for found in judgement.violations],
        "warnings": [_finding(report, found) for found in judgement.warned],
        "inconclusive": [
            {**_where(report, found.check, found.layer), "reason": found.reason}
            for found in judgement.inconclusive
        ],
        "waived": [
            {
                **_where(report, found.check, found.layer),
                "message": found.message,
                "reason": waiver.reason,
            }
            for found, waiver in judgement.waived
        ],
        "totals": {key: summary.totals[key] for key in TOTALS},
        "layers": layers,
        "flow": of_flow(report),
        "course": of_course(report),
    }


def _of_what(report: HealthReport) -> str:
    if report.observation.course is not None:
        return "training"
    return "batch" if report.observation.stepped is None else "step"


def _where(report: HealthReport, check: str, layer: str) -> dict[str, Any]:
    return {"check": check, "layer": layer, "label": label(report, layer)}


def _finding(report: HealthReport, found: Violation) -> dict[str, Any]:
    return {
        **_where(report, found.check, found.layer),
        "role": found.role,
        "tensor": found.tensor,
        "value": float(found.value),
        "limit": found.limit,
        "origin": found.origin,
        "message": found.message,
        "cause": found.cause,
        "details": found.details,
        "affected": found.layers[1:],
        "consequences": [
            {**_where(report, other.check, other.layer), "message": other.message}
            for other in found.folded
        ],
        **_places(report, found.layer),
    }


def _places(report: HealthReport, layer: str) -> dict[str, str]:
    return {"defined_at": defined_at(report, layer), "called_at": called_at(report, layer)}


TOTALS = ("layers", "parameters", "trainable", *SIZES, "peak_bytes")
"""What is said of the model as a whole, by its name in `ModelSummary`."""


def _layer(report: HealthReport, record: LayerRecord, costs: Mapping[str, Any]) -> dict[str, Any]:
    given, made = record.inputs, record.activations
    return {
        "name": record.name,
        "label": label(report, record.name),
        "type": record.type_name,
        "status": record.status.value,
        "reason": record.reason,
        "functional": record.functional,
        "calls": record.calls,
        "input_shape": None if given is None else given.shape,
        "shape": None if made is None else made.shape,
        "dtype": "" if made is None else made.dtype,
        "device": "" if made is None else made.device,
        "parameters": costs["parameters"] or 0,
        "trainable": costs["trainable"] or 0,
        "tied": record.tied,
        **{size: costs[size] for size in SIZES},
        **_places(report, record.name),
        "largest": _extremes(record.largest),
        "nonfinite": _extremes(record.nonfinite),
        "assembled": {role: asdict(found) for role, found in record.assembled.items()},
        "tensors": [
            _tensor(role, name, seen)
            for role in ROLES
            for name, seen in record.tensors(role).items()
        ],
    }


def _extremes(found: Mapping[str, Extreme]) -> dict[str, Any]:
    return {
        role: {"batch": one.batch, "sample": one.sample, "rank": one.rank}
        for role, one in found.items()
    }


def _ranks(found: Ranks) -> dict[str, Any]:
    """Return who took part; in what they disagree, the findings say."""
    return {
        "ranks": found.ranks,
        "engine": found.engine,
        "groups": [asdict(group) for group in found.groups],
        "losses": [{"loss": loss, "rank": rank} for loss, rank in found.losses],
    }


def _tensor(role: str, name: str, seen: TensorStatistics) -> dict[str, Any]:
    counts = seen.exponents.counts
    return {
        "role": role,
        "name": name,
        "shape": seen.shape,
        "dtype": seen.dtype,
        "count": seen.count,
        "nan": seen.nan_count,
        "inf": seen.inf_count,
        "zeros": seen.zero_count,
        "dead": seen.dead_fraction,
        "mean": seen.mean,
        "std": seen.std,
        "min": seen.min,
        "max": seen.max,
        "norm": seen.norm,
        "bins": {
            "lowest": seen.exponents.lowest,
            "negative": counts[:, 0].tolist(),
            "positive": counts[:, 1].tolist(),
            "sampled": seen.histogram_sampled,
        },
    }
