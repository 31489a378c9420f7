"""The summary of a model: a row for each layer, and the totals."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pytest_modelhealth.rendering.json import plain
from pytest_modelhealth.rendering.layer_tree import Branch, Row, grown
from pytest_modelhealth.rendering.model_summary_text import text
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
from pytest_modelhealth.statistics import TensorStatistics

SUMMED = ("parameters", "trainable", "activation_bytes", "multiply_adds", "saved_bytes")
"""What a layer has together with those inside, as ``all_...``."""
MAX_ROWS = 200


def rows(report: HealthReport) -> list[dict[str, Any]]:
    """Return a row for each layer, as in `ModelSummary`; a layer stands before those inside."""
    return [branch.row for root in _roots(report.observation) for branch in root.walk()]


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
    return ModelSummary(
        model_type=seen.model_type,
        run=_run(seen),
        rows=layers,
        totals=_totals(seen, layers),
        backward=seen.costs is not None and seen.costs.backward,
        notes=tuple(_notes(seen)),
        depth=depth,
        max_rows=max_rows,
        renderer=report._renderer,
    )


def _roots(seen: Observation) -> list[Branch]:
    """Return the layers that lie in no other, with those inside in execution order."""
    outer = grown(list(seen.layers))
    branches = {name: Branch() for name in seen.layers}
    roots: list[Branch] = []
    depths: dict[str, int] = {}
    for name in sorted(seen.layers, key=len):  # a layer before those in it
        around = outer[name]
        depths[name] = 0 if around is None else depths[around] + 1
        (roots if around is None else branches[around].inside).append(branches[name])
    for name in sorted(seen.layers, key=depths.__getitem__, reverse=True):  # and after them
        branch, record = branches[name], seen.layers[name]
        branch.inside.sort(key=_entered)
        first = min(map(_entered, branch.inside), default=math.inf)
        branch.entered = first if record.entered is None else record.entered
        branch.row = _row(record, depths[name], seen, branch.inside)
    return sorted(roots, key=_entered)


def _entered(branch: Branch) -> float:
    return branch.entered


def _row(
    record: LayerRecord, depth: int, seen: Observation, inside: Sequence[Branch]
) -> dict[str, Any]:
    costs = _measured(seen)
    own = None if costs is None else costs.layers.get(record.name, LayerCosts())
    sizes = _sizes(record) if own is None else own.parameters
    row: dict[str, Any] = {
        "name": record.name,
        "label": record.label,
        "depth": depth,
        "type": record.type_name,
        "status": record.status.value,
        "reason": record.reason,
        "functional": record.functional,
        "calls": record.calls,
        **_form(record, own),
        "parameters": _count(sizes),
        "trainable": _count(sizes, without=record.frozen),
        "frozen": _count(sizes, only=record.frozen),
        "shared": dict(record.tied),
        "parameter_bytes": None if sizes is None else sum(size.nbytes for size in sizes.values()),
        "activation_bytes": _activation_bytes(record, own, seen.batches),
        "multiply_adds": None if own is None else own.multiply_adds,
        "saved_bytes": None if own is None else own.saved_bytes,
    }
    returned_inside = any(branch.entered < math.inf for branch in inside)
    for key in SUMMED:
        own_part = [] if key == "activation_bytes" and returned_inside else [row[key]]
        row[f"all_{key}"] = _sum([*own_part, *(branch.row[f"all_{key}"] for branch in inside)])
    return row


def _form(record: LayerRecord, own: LayerCosts | None) -> dict[str, Any]:
    """Return the shapes that go in and out, and the dtype."""
    if own is not None:
        taken, given, dtype = own.input_shape, own.output_shape, own.dtype
    else:
        inputs, outputs = record.inputs, record.activations
        taken = None if inputs is None else inputs.shape
        given = None if outputs is None else outputs.shape
        dtype = "" if outputs is None else outputs.dtype
    return {"input_shape": taken, "output_shape": given, "dtype": dtype or None}


def _sizes(record: LayerRecord) -> Mapping[str, Size] | None:
    """Return how large its own parameters are; ``None`` where they were not looked at."""
    if record.functional:
        return {}
    if "parameters" not in record.watched:
        return None
    return {
        name: _size(seen, record.placements.get(f"parameters.{name}"))
        for name, seen in record.parameters.items()
    }


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


def _count(
    sizes: Mapping[str, Size] | None,
    *,
    only: Iterable[str] | None = None,
    without: Iterable[str] = (),
) -> int | None:
    if sizes is None:
        return None
    names = set(sizes if only is None else only) - set(without)
    return sum(size.count for name, size in sizes.items() if name in names)


def _activation_bytes(record: LayerRecord, own: LayerCosts | None, batches: int) -> int | None:
    if own is not None:
        return own.activation_bytes
    if record.activations is None:
        return None if record.calls and record.status not in UNCALLED else 0
    return _size(record.activations).nbytes // batches


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


def _run(seen: Observation) -> str:
    parts = [plural(seen.samples, "sample")] if seen.samples else []
    if seen.batches != 1:
        parts.append(f"{seen.batches:,} batches")
    return ", ".join(parts)


def _notes(seen: Observation) -> list[str]:
    why_not = [_NOT_ASKED]
    if seen.costs is not None:
        why_not = [why for why in (seen.costs.why_not, seen.costs.why_not_saved) if why]
    return [*why_not, *seen.notes, *seen.errors]


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
    data: dict[str, Any] = plain(
        {
            "model_type": summary.model_type,
            "run": summary.run,
            "backward": summary.backward,
            "totals": summary.totals,
            "notes": summary.notes,
            "rows": summary.rows,
        }
    )
    return data
