"""Everything in the report as plain data and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from pytest_modelhealth.rendering.places import called_at, class_place, defined_at
from pytest_modelhealth.rendering.summary import STATISTICS
from pytest_modelhealth.report import ROLES, HealthReport, LayerRecord, LossCall, Violation
from pytest_modelhealth.statistics import TensorStatistics, UnitStatistics

FORMAT_VERSION = 1
"""Raised when a key changes its name or meaning."""

ONE_TENSOR = ("inputs", "activations", "gradients")
"""The roles that hold one tensor's statistics; the others hold several by the tensor's own name."""


def render(report: HealthReport, *, indent: int | None = 1) -> str:
    """Return `to_dict` as strict JSON (RFC 8259) in ASCII, ending in a newline."""
    return json.dumps(to_dict(report), indent=indent, allow_nan=False) + "\n"


def to_dict(report: HealthReport) -> dict[str, Any]:
    """Return the report as dictionaries, lists, numbers, strings and ``None``.

    Numbers are exact. NaN and infinity, which JSON cannot write, are ``None``: how many there were
    stands in ``nan_count`` and the two infinity counts. Of the units, the dead ones are listed.
    """
    seen, judgement = report.observation, report._judgement
    data = {
        "format_version": FORMAT_VERSION,
        "verdict": judgement.verdict.value,
        "model_type": seen.model_type,
        "loss": seen.loss,
        "backward": seen.backward,
        "batches": seen.batches,
        "samples": seen.samples,
        "sample_deviation": seen.sample_deviation,
        "own_functions": seen.own_functions,
        "notes": list(seen.notes),
        "errors": list(seen.errors),
        "loss_calls": [_loss_call(call) for call in seen.loss_calls],
        "tasks": [asdict(task) for task in seen.tasks],
        "unregistered": [
            asdict(replace(leaf, gradient=None))
            | {"gradient": None if leaf.gradient is None else _statistics(leaf.gradient)}
            for leaf in seen.unregistered
        ],
        "probes": asdict(seen.probes),
        "costs": None if seen.costs is None else asdict(seen.costs),
        "course": None if seen.course is None else asdict(seen.course),
        "part": None if seen.part is None else asdict(seen.part),
        "ranks": None if seen.ranks is None else asdict(seen.ranks),
        "replayed": None if seen.replayed is None else asdict(seen.replayed),
        "loss_path": None if seen.loss_path is None else asdict(seen.loss_path),
        "violations": [_violation(report, violation) for violation in judgement.violations],
        "warned": [_violation(report, violation) for violation in judgement.warned],
        "broken_checks": [asdict(found) for found in judgement.broken],
        "inconclusive": [asdict(finding) for finding in judgement.inconclusive],
        "waived": [
            {"violation": asdict(violation), "waiver": asdict(waiver)}
            for violation, waiver in judgement.waived
        ],
        "unused_waivers": [asdict(waiver) for waiver in judgement.unused_waivers],
        "settings": dict(report._settings),
        "layers": [_layer(record, called_at(report, record.name)) for record in report],
    }
    return {key: plain(value) for key, value in data.items()}


def _layer(record: LayerRecord, source: str) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": record.name,
        "type_name": record.type_name,
        "status": record.status.value,
        "reason": record.reason,
        "functional": record.functional,
        "activation": record.activation,
        "entered": record.entered,
        "completed": record.completed,
        "calls": record.calls,
        "aliases": list(record.aliases),
        "frozen": sorted(record.frozen),
        "source": source,
        "defined_at": class_place(record),
        "options": dict(record.options),
        "unreached": sorted(record.unreached),
        "read_in_vain": sorted(record.read_in_vain),
        "tied": dict(record.tied),
        "grad_off": record.grad_off,
        "nonfinite_calls": dict(record.nonfinite_calls),
        "equal_samples": record.equal_samples,
        "equal_input_samples": record.equal_input_samples,
        "zero_slices": {
            name: {"rows": sorted(slices.rows), "columns": sorted(slices.columns)}
            for name, slices in record.zero_slices.items()
        },
        "largest": {role: asdict(found) for role, found in record.largest.items()},
        "nonfinite": {role: asdict(found) for role, found in record.nonfinite.items()},
        "placements": {role: asdict(found) for role, found in record.placements.items()},
        "assembled": {role: asdict(found) for role, found in record.assembled.items()},
    }
    for role in ROLES:
        tensors = {name: _statistics(seen) for name, seen in record.tensors(role).items()}
        data[role] = tensors.get("") if role in ONE_TENSOR else tensors
    return data


def _violation(report: HealthReport, violation: Violation) -> dict[str, Any]:
    return asdict(violation) | {
        "defined_at": defined_at(report, violation.layer),
        "called_at": called_at(report, violation.layer),
    }


def _loss_call(call: LossCall) -> dict[str, Any]:
    plain = replace(call, input=None, target=None)
    return asdict(plain) | {
        role: None if seen is None else _statistics(seen)
        for role, seen in (("input", call.input), ("target", call.target))
    }


def _statistics(seen: TensorStatistics) -> dict[str, Any]:
    return {
        "shape": list(seen.shape),
        "dtype": seen.dtype,
        "device": seen.device,
        **{name: getattr(seen, name) for name in STATISTICS},
        "histogram_sampled": seen.histogram_sampled,
        "first_nonfinite": None if seen.first_nonfinite is None else list(seen.first_nonfinite),
        "exponents": {"lowest": seen.exponents.lowest, "counts": seen.exponents.counts.tolist()},
        "units": None if seen.units is None else _units(seen.units),
    }


def _units(units: UnitStatistics) -> dict[str, Any]:
    return {
        "count": len(units.alive),
        "dead": np.flatnonzero(~units.alive).tolist(),
        "observations": units.observations,
    }


def plain(value: Any) -> Any:
    """Return `value` in dictionaries and lists, with ``None`` for floats that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "_asdict"):  # a named tuple, as limits are
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return value
