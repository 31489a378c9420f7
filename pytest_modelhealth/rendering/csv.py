"""The numbers as CSV: one row for each layer, role and tensor."""

from __future__ import annotations

import csv
import io
from typing import Any

from pytest_modelhealth.rendering.summary import STATISTICS
from pytest_modelhealth.report import ROLES, HealthReport

FORMAT_VERSION = 1  # raised when a column changes its name or meaning

_TAKEN = ("dtype", "device", *STATISTICS, "histogram_sampled")
COLUMNS = (
    "format_version", "layer", "type", "status", "reason", "activation", "calls", "role", "tensor",
    "shape", *_TAKEN, "first_nonfinite", "units", "unit_observations", "frozen",
    "largest_in_batch", "largest_in_sample",
)  # fmt: skip


def render(report: HealthReport) -> str:
    """Return a header and the rows, in execution order; a layer without tensors has one row.

    Floats are written so that ``float(cell)`` is the exact number, also ``nan`` and ``inf``; what
    was not observed is an empty cell. The shape and the index of the first NaN or infinity are
    written ``64x10``.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    for record in report:
        own: dict[str, Any] = {"format_version": FORMAT_VERSION, "layer": record.name}
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
                row["largest_in_sample"] = largest and largest.sample
                rows.append(row)
        writer.writerows(rows or [own])
    return text.getvalue()
