"""Everything in the report as plain data, as JSON, and its numbers as CSV."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import numpy as np

from pytest_modelhealth.rendering.places import defined_at
from pytest_modelhealth.rendering.summary import STATISTICS
from pytest_modelhealth.report import ROLES, Finding, HealthReport
from pytest_modelhealth.report.codec import encode
from pytest_modelhealth.statistics import TensorStatistics

FORMAT_VERSION = CSV_VERSION = 1
"""Raised when a key or a column changes its name or meaning."""


def to_json(report: HealthReport) -> str:
    """Return `to_dict` as strict JSON (RFC 8259) in ASCII, ending in a newline."""
    return json.dumps(to_dict(report), indent=1, allow_nan=False) + "\n"


def to_dict(report: HealthReport) -> dict[str, Any]:
    """Return the report as dictionaries, lists, numbers, strings and ``None``.

    Numbers are exact. NaN and infinity, which JSON cannot write, are ``None``: how many there were
    stands in ``nan_count`` and the two infinity counts. Of the units, the dead ones are listed.
    """
    judgement = report._judgement
    return {
        "format_version": FORMAT_VERSION,
        "verdict": judgement.verdict.value,
        **encode(report.observation),
        "violations": [finding_data(report, found) for found in judgement.violations],
        "warned": [finding_data(report, found) for found in judgement.warned],
        "noted": [finding_data(report, found) for found in judgement.notes],
        "broken_checks": encode(judgement.broken),
        "inconclusive": [finding_data(report, found) for found in judgement.inconclusive],
        "waived": [
            {"violation": encode(found), "waiver": encode(found.waiver)}
            for found in judgement.waived
        ],
        "unused_waivers": encode(judgement.unused_waivers),
        "settings": encode(dict(report._settings)),
        "layers": [
            {
                **encode(record),
                "source": report.observation.called_at(record.name),
                "defined_at": defined_at(report, record.name),
            }
            for record in report
        ],
    }


def finding_data(report: HealthReport, found: Finding) -> dict[str, Any]:
    """Return a finding with the lines of its layer: of the class and of the call."""
    data: dict[str, Any] = encode(found)
    if found.grade == "unsure":
        data["reason"] = found.reason
    called_at = report.observation.called_at(found.layer)
    return data | {"defined_at": defined_at(report, found.layer), "called_at": called_at}


@encode.register
def _(seen: TensorStatistics) -> dict[str, Any]:
    units, exponents = seen.units, seen.exponents
    names = ("shape", "dtype", "device", *STATISTICS, "histogram_sampled", "first_nonfinite")
    return {
        **{name: encode(getattr(seen, name)) for name in names},
        "exponents": {"lowest": exponents.lowest, "counts": exponents.counts.tolist()},
        "units": units
        and {
            "count": len(units.alive),
            "dead": np.flatnonzero(~units.alive).tolist(),
            "observations": units.observations,
        },
    }


# CSV: one row for each layer, role and tensor

_TAKEN = ("dtype", "device", *STATISTICS, "histogram_sampled")
COLUMNS = (
    "format_version", "layer", "type", "status", "reason", "activation", "calls", "role", "tensor",
    "shape", *_TAKEN, "first_nonfinite", "units", "unit_observations", "frozen",
    "largest_in_batch",
)  # fmt: skip


def to_csv(report: HealthReport) -> str:
    """Return a header and the rows, in execution order; a layer without tensors has one row.

    Floats are written so that ``float(cell)`` is the exact number, also ``nan`` and ``inf``; what
    was not observed is an empty cell. The shape and the index of the first NaN or infinity are
    written ``64x10``.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for record in report:
        own: dict[str, Any] = {"format_version": CSV_VERSION, "layer": record.name}
        own |= {name: getattr(record, name) for name in ("reason", "activation", "calls")}
        own |= {"type": record.type_name, "status": record.status.value}
        rows = []
        for role in ROLES:
            largest = record.largest.get(role)
            for name, seen in record.tensors(role).items():
                first, units = seen.first_nonfinite, seen.units
                row = own | {"role": role, "tensor": name}
                row |= {one: getattr(seen, one) for one in _TAKEN}
                row["shape"] = "x".join(map(str, seen.shape))
                row["first_nonfinite"] = None if first is None else "x".join(map(str, first))
                row["units"] = units and len(units.alive)
                row["unit_observations"] = units and units.observations
                row["frozen"] = name in record.frozen if role == "parameters" else None
                row["largest_in_batch"] = largest and largest.batch
                rows.append(row)
        writer.writerows(rows or [own])
    return text.getvalue()
