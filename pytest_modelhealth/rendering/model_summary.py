"""The summary of a model: a row for each layer, and the totals, as text, HTML and data."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from pytest_modelhealth.rendering.document import Document, Row
from pytest_modelhealth.rendering.json import plain
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
from pytest_modelhealth.report.ranks import Placement
from pytest_modelhealth.settings.setting import ancestors
from pytest_modelhealth.statistics import TensorStatistics

Layer = Mapping[str, Any]

SUMMED = ("parameters", "trainable", "activation_bytes", "multiply_adds", "saved_bytes")
"""What a layer has together with those inside, as ``all_...``."""
MAX_ROWS = 200


def rows(report: HealthReport) -> list[dict[str, Any]]:
    """Return a row for each layer, as in `ModelSummary`; a layer stands before those inside."""
    seen = report.observation
    ways = {  # to a layer, through those around it
        name: [*reversed([each for each in ancestors(name) if each in seen.layers]), name]
        for name in seen.layers
    }
    inside: dict[str, list[str]] = {name: [] for name in seen.layers}
    entered: dict[str, float] = {}
    found: dict[str, dict[str, Any]] = {}
    for name, way in sorted(ways.items(), key=lambda item: len(item[1]), reverse=True):
        record = seen.layers[name]
        first = min((entered[each] for each in inside[name]), default=math.inf)
        entered[name] = first if record.entered is None else record.entered
        held = [found[each] for each in inside[name]]
        found[name] = _row(record, len(way) - 1, seen, held, has_called=first < math.inf)
        if len(way) > 1:
            inside[way[-2]].append(name)
    # in execution order, of those never called the first by name
    order = {name: [(entered[each], len(each), each) for each in way] for name, way in ways.items()}
    return [found[name] for name in sorted(found, key=order.__getitem__)]


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
    inside: Sequence[Layer],
    *,
    has_called: bool,
) -> dict[str, Any]:
    """Return the row of a layer; `inside` are those of the layers in it."""
    own = _costs(record, seen)
    sizes: Any = own.parameters  # ``None`` where they were not watched
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


def _costs(record: LayerRecord, seen: Observation) -> LayerCosts:
    """Return what was measured of a layer, or what its statistics tell where nothing was."""
    costs = _measured(seen)
    if costs is not None:
        return costs.layers.get(record.name, LayerCosts())
    taken, given = record.inputs, record.activations
    unseen: Any = None if record.calls and record.status not in UNCALLED else 0
    sizes: Any = {
        name: _size(own, record.placements.get(f"parameters.{name}"))
        for name, own in record.parameters.items()
    }
    if record.functional or "parameters" not in record.watched:
        sizes = {} if record.functional else None
    unmeasured: Any = None
    return LayerCosts(
        multiply_adds=unmeasured,
        saved_bytes=None,
        activation_bytes=unseen if given is None else _size(given).nbytes // seen.batches,
        input_shape=None if taken is None else taken.shape,
        output_shape=None if given is None else given.shape,
        dtype="" if given is None else given.dtype,
        parameters=sizes,
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


def _totals(seen: Observation, layers: Sequence[Layer]) -> dict[str, int | None]:
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


# As text and HTML

_LONGEST_PERIOD = 8
"""Of siblings in turns (linear, norm, ReLU, linear, ...) so many are taken for one block."""

_WIDE = 120
"""Characters from which on there is room for the shapes of inputs."""

_NARROWEST = ((1, 12), (0, 28), (-1, 8), (1, 8), (0, 16))
"""Columns that give way when the table is too wide, in this order, and how far."""

_TIES = 5


def document(summary: ModelSummary, *, wide: bool = True) -> Document:
    """Return the tree of layers as a table, and the totals below.

    Each row has the numbers of a layer with all inside.

    Args:
        summary: what to show.
        wide: whether the shapes of inputs are shown.
    """
    every = list(_shown(summary.rows, summary.depth))
    lines = every[: summary.max_rows]
    columns = [column for column in COLUMNS if column.title != "input" or wide]
    rows = [
        Row([row], "alike")
        if isinstance(row, str)
        else Row([c.cell(row) for c in columns], help=row["reason"], name=printable(row["label"]))
        for row in lines
    ]
    left_out = len(every) - len(lines)
    more = f"... and {plural(left_out, 'more line')}: summary(max_rows=None) shows all"
    return Document(
        line(summary),
        columns=columns,
        rows=rows,
        rest=more if left_out else "" if rows else "\nno layers",
        code=facts(summary),
        remarks=[printable(note) for note in summary.notes],
        narrowest=[(column % len(columns), least) for column, least in _NARROWEST],
    )


def text(summary: ModelSummary, *, width: int = 100) -> str:
    """Return it for a terminal; names, types and remarks are cut to fit `width` characters."""
    return document(summary, wide=width >= _WIDE).text(width=width)


def fragment(summary: ModelSummary) -> str:
    """Return a self-contained ``<div>``; every name in it is escaped."""
    return document(summary).html()


def line(summary: ModelSummary) -> str:
    """Return what was summarised, in one line."""
    found = summary.totals
    parts = [plural(found["layers"] or 0, "layer")]
    if found["parameters"] is not None:
        parts.append(plural(found["parameters"], "parameter"))
    parts += [summary.run] if summary.run else []
    return f"{printable(summary.model_type)}: {', '.join(parts)}"


def _shown(rows: Sequence[Layer], depth: int | None) -> Iterator[Layer | str]:
    """Yield rows, each before those in it, and a text for siblings that are like those before."""
    starts = [at for at, row in enumerate(rows) if row["depth"] == rows[0]["depth"]]
    siblings = [rows[start:end] for start, end in pairwise([*starts, len(rows)])]
    names = {"name", "label", "shared", "reason"}
    alike = [[{k: v for k, v in row.items() if k not in names} for row in own] for own in siblings]
    place = 0
    while place < len(siblings):
        period, times = _repeated(alike[place:])
        for first, *inside in siblings[place : place + period]:
            yield first
            if depth is None or first["depth"] < depth:
                yield from _shown(inside, depth)
        others = siblings[place + period : place + period * (1 + times)]
        if others:
            ends = (
                printable(own[0]["label"].rpartition(".")[2]) for own in (others[0], others[-1])
            )
            layers = plural(sum(map(len, others)), "layer")
            indent = "  " * others[0][0]["depth"]
            yield f"{indent}{' .. '.join(ends)}: {times:,} times the same ({layers})"
        place += period + len(others)


def _repeated(alike: Sequence[Any]) -> tuple[int, int]:
    """Return how many first siblings come again, and how often after the first time.

    Two alike are no burden: a block has to come three times to stand once.
    """
    best = (1, 0)
    for period in range(1, _LONGEST_PERIOD + 1):
        end = period
        while end < len(alike) and alike[end] == alike[end - period]:
            end += 1
        times = end // period - 1
        if times >= 2 and period * times > best[0] * best[1]:
            best = period, times
    return best


def _remark(row: Layer) -> str:
    parts = []
    if row["status"] == Status.OPAQUE:
        parts.append("opaque")
    elif not row["calls"] and not row["all_activation_bytes"]:
        parts.append("uncalled")
    if row["calls"] > 1:
        parts.append(plural(row["calls"], "call"))
    if row["all_parameters"] and row["all_trainable"] == 0:
        parts.append("frozen")
    elif row["frozen"]:
        parts.append(f"{row['frozen']:,} frozen")
    if row["shared"]:
        parts.append("tied")
    return ", ".join(parts)


def _counted(title: str, help_: str, key: str, form: Callable[[Any], str]) -> Column:
    return Column(title, help_, lambda row: NOT_SEEN if row[key] is None else form(row[key]))


def _own_name(row: Layer) -> str:
    own = printable(row["name"].rpartition(".")[2] or row["label"])
    return f"{'  ' * row['depth']}{own}"


COLUMNS = (
    Column("layer", "name of the layer, below the layer that it lies in", _own_name, is_text=True),
    Column("type", "class of the module, or the function", lambda r: printable(r["type"]), True),
    _counted("input", "shape of the first input", "input_shape", shape),
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


def facts(summary: ModelSummary) -> list[str]:
    """Return the totals, a line each; those that were not measured are left out."""
    found = summary.totals
    values = {key: in_bytes(n) if key.endswith("_bytes") else whole(n) for key, n in found.items()}
    values["multiply_adds"] = scaled(found["multiply_adds"])
    values["phases"] = "forward, loss and backward" if summary.backward else "the forward"
    listed = [
        tuple(fact.format(values[key], **values).split("  ", 1))
        for key, fact in _FACTS.items()
        if found[key] is not None
    ]
    ties = [
        ("tied", f"{printable(row['name'] + '.' * bool(row['name']) + own)} is {printable(full)}")
        for row in summary.rows
        for own, full in row["shared"].items()
    ]
    listed += ties[:_TIES]
    listed += [("tied", f"and {len(ties) - _TIES:,} more")] * (len(ties) > _TIES)
    return table(listed, left=(0, 1)) if listed else []
