"""The numbers as CSV: one row for each layer, role and tensor."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator

from pytest_modelhealth.rendering.summary import STATISTICS
from pytest_modelhealth.report import ROLES, HealthReport, LayerRecord
from pytest_modelhealth.statistics import TensorStatistics

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
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*LAYER_COLUMNS, *TENSOR_COLUMNS])
    for record in report:
        writer.writerows(_rows(record))
    return text.getvalue()


def _rows(record: LayerRecord) -> Iterator[list[object]]:
    layer = [FORMAT_VERSION, record.name, record.type_name, record.status.value, record.reason]
    layer += [record.activation, record.calls]
    rows = [
        [*layer, role, tensor, *_cells(seen), _frozen(record, role, tensor), *_place(record, role)]
        for role in ROLES
        for tensor, seen in record.tensors(role).items()
    ]
    yield from rows or [[*layer, "", "", *[""] * len(TENSOR_COLUMNS)]]


def _cells(seen: TensorStatistics) -> list[object]:
    first, units = seen.first_nonfinite, seen.units
    return [
        _joined(seen.shape),
        seen.dtype,
        seen.device,
        *(getattr(seen, name) for name in STATISTICS),
        seen.histogram_sampled,
        None if first is None else _joined(first),
        None if units is None else len(units.alive),
        None if units is None else units.observations,
    ]


def _joined(numbers: Iterable[int]) -> str:
    return "x".join(map(str, numbers))


def _frozen(record: LayerRecord, role: str, tensor: str) -> bool | None:
    return tensor in record.frozen if role == "parameters" else None


def _place(record: LayerRecord, role: str) -> tuple[int | None, int | None]:
    """Return batch and sample of the largest magnitude, where that is known."""
    found = record.largest.get(role)
    return (None, None) if found is None else (found.batch, found.sample)
