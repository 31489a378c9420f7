"""The summary of a model: a row for each layer, and the totals."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from pytest_modelhealth.rendering.json import plain
from pytest_modelhealth.rendering.model_summary_text import Row, text
from pytest_modelhealth.rendering.notation import plural
from pytest_modelhealth.report import (
    UNCALLED,
    Costs,
    HealthReport,
    LayerCosts,
    LayerRecord,
    ModelSummary,
    Observation,
    Size,
)
from pytest_modelhealth.report.ranks import Placement
from pytest_modelhealth.settings.setting import ancestors
from pytest_modelhealth.statistics import TensorStatistics

SUMMED = ("parameters", "trainable", "activation_bytes", "multiply_adds", "saved_bytes")
"""What a layer has together with those inside, as ``all_...``."""
MAX_ROWS = 200


def rows(report: HealthReport) -> list[dict[str, Any]]:
    """Return a row for each layer, as in `ModelSummary`; a layer stands before those inside."""
    seen = report.observation
    inside: dict[str | None, list[str]] = {name: [] for name in (None, *seen.layers)}
    depths: dict[str | None, int] = {None: -1}
    for name in sorted(seen.layers, key=len):  # a layer before those in it
        around = next((outer for outer in ancestors(name) if outer in seen.layers), None)
        depths[name] = depths[around] + 1
        inside[around].append(name)
    entered: dict[str, float] = {}
    found: dict[str, dict[str, Any]] = {}
    for name in sorted(seen.layers, key=depths.__getitem__, reverse=True):  # and after them
        record = seen.layers[name]
        first = min((entered[each] for each in inside[name]), default=math.inf)
        entered[name] = first if record.entered is None else record.entered
        held = [found[each] for each in inside[name]]
        found[name] = _row(record, depths[name], seen, held, has_called=first < math.inf)
    ordered, waiting = [], [*inside[None]]
    waiting.sort(key=entered.__getitem__, reverse=True)
    while waiting:
        name = waiting.pop()
        ordered.append(found[name])
        # the first one called is taken next; of those never called the first by name
        waiting += sorted(inside[name], key=entered.__getitem__)[::-1]
    return ordered


def summarised(
    report: HealthReport, depth: int | None = None, max_rows: int | None = MAX_ROWS
) -> ModelSummary:
    """Return the summary of a report.

    Args:
        report: the report.
        depth: show layers in at most so many others.
        max_rows: show at most so many lines.
    """
    seen, layers = report.observation, rows(report)
    run = [plural(seen.samples, "sample")] if seen.samples else []
    run += [f"{seen.batches:,} batches"] if seen.batches != 1 else []
    why_not = [_NOT_ASKED]
    if seen.costs is not None:
        why_not = [why for why in (seen.costs.why_not, seen.costs.why_not_saved) if why]
    return ModelSummary(
        model_type=seen.model_type,
        run=", ".join(run),
        rows=layers,
        totals=_totals(seen, layers),
        backward=seen.costs is not None and seen.costs.backward,
        notes=(*why_not, *seen.notes, *seen.errors),
        depth=depth,
        max_rows=max_rows,
        renderer=report._renderer,
    )


def _row(
    record: LayerRecord,
    depth: int,
    seen: Observation,
    inside: Sequence[Row],
    *,
    has_called: bool,
) -> dict[str, Any]:
    """Return the row of a layer; `inside` are those of the layers in it."""
    own = _costs(record, seen)
    sizes = own.parameters
    trainable = [size.count for name, size in (sizes or {}).items() if name not in record.frozen]
    row: dict[str, Any] = {
        **{key: getattr(record, key) for key in ("name", "label", "reason", "functional", "calls")},
        "depth": depth,
        "type": record.type_name,
        "status": record.status.value,
        "input_shape": own.input_shape,
        "output_shape": own.output_shape,
        "dtype": own.dtype or None,
        "parameters": None if sizes is None else sum(size.count for size in sizes.values()),
        "trainable": None if sizes is None else sum(trainable),
        "frozen": None if sizes is None else sum(s.count for s in sizes.values()) - sum(trainable),
        "shared": dict(record.tied),
        "parameter_bytes": None if sizes is None else sum(s.nbytes for s in sizes.values()),
        "activation_bytes": own.activation_bytes,
        "multiply_adds": own.multiply_adds,
        "saved_bytes": own.saved_bytes,
    }
    for key in SUMMED:
        # what an inner layer returned is what the outer one returns
        own_part = [] if key == "activation_bytes" and has_called else [row[key]]
        row[f"all_{key}"] = _sum([*own_part, *(each[f"all_{key}"] for each in inside)])
    return row


def _costs(record: LayerRecord, seen: Observation) -> LayerCosts | SimpleNamespace:
    """Return what was measured of a layer, or what its statistics tell where nothing was."""
    costs = _measured(seen)
    if costs is not None:
        return costs.layers.get(record.name, LayerCosts())
    taken, given = record.inputs, record.activations
    unseen = None if record.calls and record.status not in UNCALLED else 0
    sizes: dict[str, Size] | None = {
        name: _size(own, record.placements.get(f"parameters.{name}"))
        for name, own in record.parameters.items()
    }
    if record.functional or "parameters" not in record.watched:
        sizes = {} if record.functional else None
    return SimpleNamespace(
        input_shape=None if taken is None else taken.shape,
        output_shape=None if given is None else given.shape,
        dtype=None if given is None else given.dtype,
        parameters=sizes,
        activation_bytes=unseen if given is None else _size(given).nbytes // seen.batches,
        multiply_adds=None,
        saved_bytes=None,
    )


def _size(seen: TensorStatistics, placement: Placement | None = None) -> Size:
    """Return how large a tensor is, over all ranks that have a part of it."""
    if placement is not None:
        count = math.prod(placement.shape)
    else:
        count = seen.count // 2 if seen.dtype.startswith("complex") else seen.count
    return Size(count, count * itemsize(seen.dtype))


def itemsize(dtype: str) -> int:
    """Return the bytes of an element: 2 for ``"bfloat16"``, 1 for ``"float8_e4m3fn"``."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1  # a bool has one


def _sum(parts: Sequence[int | None]) -> int | None:
    """Return the sum, ``None`` if a part of it is not known."""
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _totals(seen: Observation, layers: Sequence[Row]) -> dict[str, int | None]:
    roots = [row for row in layers if row["depth"] == 0]
    owned = ("parameters", "trainable", "frozen", "parameter_bytes")
    measured = ("multiply_adds", "saved_bytes", "peak_bytes", "held_bytes", "cuda_peak_bytes")
    costs = _measured(seen)
    return {
        "layers": len(layers),
        **{key: _sum([row[key] for row in layers]) for key in owned},
        "activation_bytes": _sum([row["all_activation_bytes"] for row in roots]),
        **{key: None if costs is None else getattr(costs, key) for key in measured},
    }


def _measured(seen: Observation) -> Costs | None:
    """Return what a run cost, where that was asked for and possible."""
    return None if seen.costs is None or seen.costs.why_not else seen.costs


_NOT_ASKED = (
    "'-' was not measured: Inspector(model).summary(batch), or run_inspection(..., costs=True), "
    "measures it"
)


def render(
    report: HealthReport,
    *,
    depth: int | None = None,
    max_rows: int | None = MAX_ROWS,
    width: int = 100,
) -> str:
    """Return the summary of a report as text; arguments as in `summarised` and `text`."""
    return text(summarised(report, depth, max_rows), width=width)


def to_dict(summary: ModelSummary) -> dict[str, Any]:
    """Return a summary as dictionaries, lists, numbers, strings and ``None``."""
    keys = ("model_type", "run", "backward", "totals", "notes", "rows")
    data: dict[str, Any] = plain({key: getattr(summary, key) for key in keys})
    return data
