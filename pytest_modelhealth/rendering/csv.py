"""The numbers as CSV: one row for each layer, role and tensor."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from pytest_modelhealth.rendering.summary import STATISTICS
from pytest_modelhealth.report import ROLES, HealthReport, LayerRecord

FORMAT_VERSION = 1
"""Raised when a column changes its name or meaning."""

LAYER_COLUMNS = ("format_version", "layer", "type", "status", "reason", "role", "tensor")
TENSOR_COLUMNS = ("shape", "dtype", "device", *STATISTICS)


def render(report: HealthReport) -> str:
    """Return a header and the rows, in execution order; a layer without tensors has one row.

    Floats are written so that ``float(cell)`` is the exact number, also ``nan`` and ``inf``; what
    was not observed is an empty cell. ``shape`` is written ``64x10``.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*LAYER_COLUMNS, *TENSOR_COLUMNS])
    for record in report:
        writer.writerows(_rows(record))
    return text.getvalue()


def _rows(record: LayerRecord) -> Iterator[list[object]]:
    layer = [FORMAT_VERSION, record.name, record.type_name, record.status.value, record.reason]
    rows = [
        [*layer, role, tensor, "x".join(map(str, seen.shape)), seen.dtype, seen.device]
        + [getattr(seen, name) for name in STATISTICS]
        for role in ROLES
        for tensor, seen in record.tensors(role).items()
    ]
    yield from rows or [[*layer, "", "", *[""] * len(TENSOR_COLUMNS)]]
