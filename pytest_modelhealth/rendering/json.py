"""Everything in the report as plain data and as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from enum import Enum
from typing import Any

import numpy as np

from pytest_modelhealth.rendering.places import called_at, class_place, defined_at
from pytest_modelhealth.rendering.summary import STATISTICS
from pytest_modelhealth.report import ROLES, HealthReport, LayerRecord, Violation
from pytest_modelhealth.statistics import TensorStatistics

FORMAT_VERSION = 1
"""Raised when a key changes its name or meaning."""

ONE_TENSOR = ("inputs", "activations", "gradients")
"""The roles that hold one tensor's statistics; the others hold several by the tensor's own name."""


_OF_THE_RUN = (
    "model_type", "loss", "backward", "batches", "samples", "sample_deviation", "own_functions",
    "notes", "errors",
)  # fmt: skip
_PARTS = ("probes", "costs", "course", "part", "ranks", "replayed", "loss_path")
_OF_A_LAYER = (
    "name", "type_name", "status", "reason", "functional", "activation", "entered", "completed",
    "calls", "aliases",
)  # fmt: skip
_OF_ITS_CALLS = ("tied", "grad_off", "nonfinite_calls", "equal_samples", "equal_input_samples")


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
        **{name: getattr(seen, name) for name in _OF_THE_RUN},
        "loss_calls": [_with_statistics(call, "input", "target") for call in seen.loss_calls],
        "tasks": [asdict(task) for task in seen.tasks],
        "unregistered": [_with_statistics(leaf, "gradient") for leaf in seen.unregistered],
        **{name: (part := getattr(seen, name)) and asdict(part) for name in _PARTS},
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
        **{name: getattr(record, name) for name in _OF_A_LAYER},
        "frozen": sorted(record.frozen),
        "source": source,
        "defined_at": class_place(record),
        "options": dict(record.options),
        "unreached": sorted(record.unreached),
        "read_in_vain": sorted(record.read_in_vain),
        **{name: getattr(record, name) for name in _OF_ITS_CALLS},
        "zero_slices": {
            name: {"rows": sorted(slices.rows), "columns": sorted(slices.columns)}
            for name, slices in record.zero_slices.items()
        },
        **{
            name: {role: asdict(found) for role, found in getattr(record, name).items()}
            for name in ("largest", "nonfinite", "placements", "assembled")
        },
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


def _statistics(seen: TensorStatistics | None) -> dict[str, Any] | None:
    if seen is None:
        return None
    units, exponents = seen.units, seen.exponents
    return {
        **{name: getattr(seen, name) for name in ("shape", "dtype", "device", *STATISTICS)},
        **{name: getattr(seen, name) for name in ("histogram_sampled", "first_nonfinite")},
        "exponents": {"lowest": exponents.lowest, "counts": exponents.counts.tolist()},
        "units": None
        if units is None
        else {
            "count": len(units.alive),
            "dead": np.flatnonzero(~units.alive).tolist(),
            "observations": units.observations,
        },
    }


def _with_statistics(made: Any, *names: str) -> dict[str, Any]:
    """Return a record with the statistics that it holds by these names."""
    own = {name: _statistics(getattr(made, name)) for name in names}
    return asdict(replace(made, **dict.fromkeys(names))) | own


def plain(value: Any) -> Any:
    """Return `value` in dictionaries and lists, with ``None`` for floats that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "_asdict"):  # a named tuple, as limits are
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return value
