"""The numbers as CSV: one row for each layer, role and tensor."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from pytest_modelhealth.rendering.summary import STATISTICS
from pytest_modelhealth.report import ROLES, HealthReport, LayerRecord

FORMAT_VERSION = 1
"""Raised when a column changes its name or meaning."""

LAYER_COLUMNS = (
    "format_version", "layer", "type", "status", "reason", "activation", "calls", "role", "tensor"
)  # fmt: skip
TENSOR_COLUMNS = (
    "shape", "dtype", "device", *STATISTICS, "histogram_sampled", "first_nonfinite", "units",
    "unit_observations", "frozen", "largest_in_batch", "largest_in_sample",
)  # fmt: skip


def render(report: HealthReport) -> str:
    """Return a header and the rows, in execution order; a layer without tensors has one row.

    Floats are written so that ``float(cell)`` is the exact number, also ``nan`` and ``inf``; what
    was not observed is an empty cell. The shape and the index of the first NaN or infinity are
    written ``64x10``.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, [*LAYER_COLUMNS, *TENSOR_COLUMNS], lineterminator="\n")
    writer.writeheader()
    for record in report:
        writer.writerows(list(_rows(record)) or [_layer(record)])
    return text.getvalue()


def _layer(record: LayerRecord) -> dict[str, object]:
    own = {name: getattr(record, name) for name in ("reason", "activation", "calls")}
    own |= {"layer": record.name, "type": record.type_name, "status": record.status.value}
    return {"format_version": FORMAT_VERSION, **own}


def _rows(record: LayerRecord) -> Iterator[dict[str, object]]:
    for role in ROLES:
        largest = record.largest.get(role)
        for tensor, seen in record.tensors(role).items():
            first, units = seen.first_nonfinite, seen.units
            yield {
                **_layer(record),
                **{name: getattr(seen, name) for name in (*STATISTICS, *_PLAIN)},
                "role": role,
                "tensor": tensor,
                "shape": "x".join(map(str, seen.shape)),
                "first_nonfinite": None if first is None else "x".join(map(str, first)),
                "units": units and len(units.alive),
                "unit_observations": units and units.observations,
                "frozen": tensor in record.frozen if role == "parameters" else None,
                "largest_in_batch": largest and largest.batch,
                "largest_in_sample": largest and largest.sample,
            }


_PLAIN = ("dtype", "device", "histogram_sampled")
