"""What a snapshot check found, as plain data."""

from __future__ import annotations

from typing import Any

from pytest_modelhealth.snapshot.changes import phrases
from pytest_modelhealth.snapshot.drift import Drift, Outcome, SnapshotCheck, summary
from pytest_modelhealth.snapshot.snapshot import LayerLine, Snapshot


def of_drift(check: SnapshotCheck) -> dict[str, Any]:
    """Return a snapshot check by the keys of the file of a run."""
    found = check.found
    drifted = found is not None and found.drifted
    return {
        "kind": "drift",
        "verdict": check.outcome.value,
        "headline": _headline(check),
        "text": check.text,
        "model": check.now.model,
        "snapshot": check.file,
        "tensors": 0 if found is None else found.tensors,
        "story": "" if found is None else found.story,
        "drifts": [] if found is None else [_drift(drift) for drift in found.drifts],
        "changes": [] if found is None else phrases(found.changes),
        "before": _layers(check.before) if drifted and check.before is not None else [],
        "now": _layers(check.now) if drifted else [],
    }


def _headline(check: SnapshotCheck) -> str:
    if check.found is not None and check.found.drifted:
        return summary(check.found)
    if check.text:
        return check.text.partition("\n")[0]
    if check.outcome is Outcome.RECORDED:
        return f"recorded in {check.file}"
    return str(check.found) if check.found is not None else check.outcome.value


def _drift(drift: Drift) -> dict[str, Any]:
    return {
        "layer": drift.layer,
        "label": drift.label,
        "role": drift.role,
        "statistic": drift.statistic,
        "before": drift.before,
        "now": drift.now,
        "distance": drift.distance,
        "allowed": drift.allowance.distance,
        "moved": drift.moved,
    }


def _layers(snapshot: Snapshot) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "type": line.type,
            "status": line.status,
            "calls": line.calls,
            "tensors": _tensors(line),
        }
        for name, line in snapshot.layers.items()
    ]


def _tensors(line: LayerLine) -> list[dict[str, Any]]:
    return [
        {
            "role": role,
            "name": own_name,
            "shape": tensor.shape,
            "dtype": tensor.dtype,
            "mean": tensor.mean,
            "std": tensor.std,
            "min": tensor.min,
            "max": tensor.max,
            "zeros": tensor.zeros,
            "dead": tensor.dead,
            "nan": tensor.nan,
            "inf": tensor.inf,
        }
        for (role, own_name), tensor in line.tensors.items()
    ]
