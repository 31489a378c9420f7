"""The summary of a model: a row for each layer, and the totals, as text and HTML."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pytest_modelhealth.rendering.document import Document, Row
from pytest_modelhealth.rendering.notation import (
    NOT_SEEN,
    Column,
    in_bytes,
    plural,
    printable,
    scaled,
    shape,
    table,
    whole,
)
from pytest_modelhealth.report import (
    UNCALLED,
    Costs,
    HealthReport,
    LayerCosts,
    LayerRecord,
    ModelSummary,
    Observation,
    Size,
    Status,
)
from pytest_modelhealth.report.parts import Placement
from pytest_modelhealth.settings.setting import ancestors
from pytest_modelhealth.statistics import TensorStatistics

Layer = Mapping[str, Any]

# what a layer has together with those inside, as ``all_...``
SUMMED = ("parameters", "trainable", "activation_bytes", "multiply_adds", "saved_bytes")
_COSTS = SUMMED[2:]
_OWNED = ("parameters", "trainable", "frozen", "parameter_bytes")
MAX_ROWS = 200

_NOT_ASKED = (
    "'-' was not measured: Inspector(model).summary(batch), or run_inspection(..., costs=True), "
    "measures it"
)


def summarised(
    report: HealthReport, depth: int | None = None, max_rows: int | None = MAX_ROWS
) -> ModelSummary:
    """Return the summary of a report, shown with layers in at most `depth` others."""
    seen, layers, costs = report.observation, rows(report), report.observation.costs
    run = [plural(seen.samples, "sample")] if seen.samples else []
    run += [f"{seen.batches:,} batches"] if seen.batches != 1 else []
    why_not = [_NOT_ASKED] if costs is None else [costs.why_not, costs.why_not_saved]
    measured = (*SUMMED[3:], "peak_bytes", "held_bytes", "cuda_peak_bytes")
    known = _measured(seen)
    totals = {
        "layers": len(layers),
        **{key: _sum([row[key] for row in layers]) for key in _OWNED},
        "activation_bytes": _sum(r["all_activation_bytes"] for r in layers if r["depth"] == 0),
        **{key: None if known is None else getattr(known, key) for key in measured},
    }
    return ModelSummary(
        model_type=seen.model_type,
        run=", ".join(run),
        rows=layers,
        totals=totals,
        backward=costs is not None and costs.backward,
        notes=(*filter(None, why_not), *seen.notes, *seen.errors),
        depth=depth,
        max_rows=max_rows,
        renderer=report._renderer,
    )


def rows(report: HealthReport) -> list[dict[str, Any]]:
    """Return a row for each layer, as in `ModelSummary`; a layer stands before those inside."""
    seen = report.observation
    ways = {  # to a layer, through those around it
        name: [*reversed([each for each in ancestors(name) if each in seen.layers]), name]
        for name in seen.layers
    }
    inside: dict[str, list[str]] = {name: [] for name in seen.layers}
    entered: dict[str, float] = {}
    made: dict[str, dict[str, Any]] = {}
    for name, way in sorted(ways.items(), key=lambda item: len(item[1]), reverse=True):
        record, parts = seen.layers[name], [made[each] for each in inside[name]]
        first = min((entered[each] for each in inside[name]), default=math.inf)
        entered[name] = first if record.entered is None else record.entered
        made[name] = row = _row(record, len(way) - 1, seen)
        for key in SUMMED:
            # what an inner layer returned is what the outer one returns
            is_theirs = key == "activation_bytes" and first < math.inf
            own = [] if is_theirs else [row[key]]
            row[f"all_{key}"] = _sum([*own, *(each[f"all_{key}"] for each in parts)])
        if len(way) > 1:
            inside[way[-2]].append(name)
    # in execution order, of those never called the first by name
    order = {name: [(entered[each], len(each), each) for each in way] for name, way in ways.items()}
    return [made[name] for name in sorted(made, key=order.__getitem__)]


def _row(record: LayerRecord, depth: int, seen: Observation) -> dict[str, Any]:
    """Return the row of a layer itself."""
    costs, batch, output = _measured(seen), record.inputs, record.activations
    if costs is not None:
        own: Any = costs.layers.get(record.name, LayerCosts())
        told = {key: getattr(own, key) for key in ("input_shape", "output_shape", *_COSTS)}
        dtype, sizes = own.dtype or None, own.parameters
    else:  # what the statistics tell
        unseen = None if record.calls and record.status not in UNCALLED else 0
        made = unseen if output is None else _size(output).nbytes // seen.batches
        told = {"input_shape": batch and batch.shape, "output_shape": output and output.shape}
        told |= dict.fromkeys(_COSTS) | {"activation_bytes": made}
        dtype, sizes = output and output.dtype, None
        if record.functional or "parameters" in record.watched:
            sizes = {
                name: _size(own, record.placements.get(f"parameters.{name}"))
                for name, own in (() if record.functional else record.parameters.items())
            }
    owned: dict[str, Any] = dict.fromkeys(_OWNED)
    if sizes is not None:
        counts = {name: size.count for name, size in sizes.items()}
        frozen = sum(count for name, count in counts.items() if name in record.frozen)
        total = sum(counts.values())
        owned = {"parameters": total, "trainable": total - frozen, "frozen": frozen}
        owned["parameter_bytes"] = sum(size.nbytes for size in sizes.values())
    return {
        **{key: getattr(record, key) for key in ("name", "label", "reason", "functional", "calls")},
        "depth": depth,
        "type": record.type_name,
        "status": record.status.value,
        **{key: told.pop(key) for key in ("input_shape", "output_shape")},
        "dtype": dtype,
        **owned,
        "shared": dict(record.tied),
        **told,
    }


def _measured(seen: Observation) -> Costs | None:
    """Return what a run cost, where that was asked for and possible."""
    return None if seen.costs is None or seen.costs.why_not else seen.costs


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


def _sum(parts: Iterable[int | None]) -> int | None:
    """Return the sum, ``None`` if a part of it is not known."""
    known = list(parts)
    return None if None in known else sum(filter(None, known))


# As text and HTML


def document(summary: ModelSummary) -> Document:
    """Return what was summarised, the layers, each with all inside, and the totals."""
    every = [r for r in summary.rows if summary.depth is None or r["depth"] <= summary.depth]
    rows = [
        Row([c.cell(row) for c in COLUMNS], help=row["reason"], name=printable(row["label"]))
        for row in every
    ]
    totals = summary.totals
    parts = [plural(totals["layers"] or 0, "layer")]
    if totals["parameters"] is not None:
        parts.append(plural(totals["parameters"], "parameter"))
    parts += [summary.run] if summary.run else []
    return Document(
        f"{printable(summary.model_type)}: {', '.join(parts)}",
        columns=COLUMNS,
        rows=rows,
        most=summary.max_rows,
        rest=lambda n: f"... and {plural(n, 'more line')}: summary(max_rows=None) shows all",
        below=[] if rows else ["", "no layers"],
        code=_facts(summary),
        remarks=[printable(note) for note in summary.notes],
        narrowest=((1, 12), (0, 28), (len(COLUMNS) - 1, 8), (1, 8), (0, 16)),
    )


def _remark(row: Layer) -> str:
    calls, is_opaque = row["calls"], row["status"] == Status.OPAQUE
    is_frozen = row["all_parameters"] and row["all_trainable"] == 0
    remarks = {
        "opaque": is_opaque,
        "uncalled": not (is_opaque or calls or row["all_activation_bytes"]),
        plural(calls, "call"): calls > 1,
        "frozen": is_frozen,
        f"{row['frozen'] or 0:,} frozen": row["frozen"] and not is_frozen,
        "tied": row["shared"],
    }
    return ", ".join(remark for remark, holds in remarks.items() if holds)


def _counted(title: str, help_: str, key: str, form: Callable[[Any], str]) -> Column:
    return Column(title, help_, lambda row: NOT_SEEN if row[key] is None else form(row[key]))


COLUMNS = (
    Column(
        "layer",
        "name of the layer, below the layer that it lies in",
        lambda r: "  " * r["depth"] + printable(r["name"].rpartition(".")[2] or r["label"]),
        is_text=True,
    ),
    Column("type", "class of the module, or the function", lambda r: printable(r["type"]), True),
    _counted("output", "shape of the first output", "output_shape", shape),
    _counted("params", "elements of all parameters, shared ones once", "all_parameters", whole),
    _counted("mult-adds", "multiplications with an addition, forward", "all_multiply_adds", scaled),
    _counted("activations", "bytes returned by innermost layers", "all_activation_bytes", in_bytes),
    _counted("saved", "bytes that autograd keeps for backward", "all_saved_bytes", in_bytes),
    Column("", "what is special", _remark, is_text=True),
)

_FACTS = {
    "parameters": "parameters  {} ({parameter_bytes}): {trainable} trainable, {frozen} frozen",
    "multiply_adds": "mult-adds  {} in the forward, by torch's counter (2 flops each)",
    "activation_bytes": "activations  {} returned by the innermost layers",
    "saved_bytes": "saved  {} for the backward pass, beyond parameters and batch",
    "peak_bytes": "peak  {} of tensors in {phases}, {held_bytes} of it model and batch",
    "cuda_peak_bytes": "peak  {} by CUDA's allocator",
}


def _facts(summary: ModelSummary) -> list[str]:
    """Return the totals, a line each; those that were not measured are left out."""
    totals = summary.totals
    values = {key: in_bytes(n) if key.endswith("_bytes") else whole(n) for key, n in totals.items()}
    values["multiply_adds"] = scaled(totals["multiply_adds"])
    values["phases"] = "forward, loss and backward" if summary.backward else "the forward"
    listed = [
        tuple(fact.format(values[key], **values).split("  ", 1))
        for key, fact in _FACTS.items()
        if totals[key] is not None
    ]
    return table(listed, left=(0, 1)) if listed else []
