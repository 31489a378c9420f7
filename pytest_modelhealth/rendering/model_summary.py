"""The summary of a model: a row for each layer, the totals, and both as text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_modelhealth.rendering.layer_tree import Alike, Branch, Row, grown, shown
from pytest_modelhealth.rendering.notation import (
    NOT_SEEN,
    plural,
    printable,
    shape,
    shorten,
    table,
)
from pytest_modelhealth.report import (
    HealthReport,
    LayerCosts,
    LayerRecord,
    ModelSummary,
    Observation,
    Size,
    Status,
)
from pytest_modelhealth.statistics import TensorStatistics

SUMMED = ("parameters", "activation_bytes", "multiply_adds", "saved_bytes")
"""What a layer has together with those inside, as ``all_...``."""
MAX_ROWS = 200


# The numbers.


def rows(report: HealthReport) -> list[dict[str, Any]]:
    """Return a row for each layer, as in `ModelSummary`; a layer stands before those inside."""
    return [branch.row for root in _roots(report.observation) for branch in root.walk()]


def totals(report: HealthReport) -> dict[str, int | None]:
    """Return the numbers of the whole model, as in `ModelSummary`."""
    return _totals(report.observation, rows(report))


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
        renderer=report.renderer,
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
    costs = None if seen.costs is None or seen.costs.why_not else seen.costs
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
    return {name: _size(seen) for name, seen in record.parameters.items()}


def _size(seen: TensorStatistics) -> Size:
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
        return None if record.calls and record.status is not Status.NOT_CALLED else 0
    return _size(record.activations).nbytes // batches


def _sum(parts: Sequence[int | None]) -> int | None:
    """Return the sum, ``None`` if a part of it is not known."""
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _totals(seen: Observation, layers: Sequence[Row]) -> dict[str, int | None]:
    roots = [row for row in layers if row["depth"] == 0]
    whole = {key: _sum([row[f"all_{key}"] for row in roots]) for key in SUMMED}
    owned = ("trainable", "frozen", "parameter_bytes")
    costs = None if seen.costs is None or seen.costs.why_not else seen.costs
    return {
        "layers": len(layers),
        **{key: _sum([row[key] for row in layers]) for key in ("parameters", *owned)},
        **{key: whole[key] for key in SUMMED[1:]},
        **{
            key: None if costs is None else getattr(costs, key)
            for key in ("peak_bytes", "held_bytes", "cuda_peak_bytes")
        },
    }


def _run(seen: Observation) -> str:
    parts = [plural(seen.samples, "sample")] if seen.samples else []
    if seen.batches != 1:
        parts.append(f"{seen.batches:,} batches")
    return ", ".join(parts)


def _notes(seen: Observation) -> list[str]:
    why_not = seen.costs.why_not if seen.costs is not None else _NOT_ASKED
    return [*([why_not] if why_not else []), *seen.notes, *seen.errors]


_NOT_ASKED = "'-' was not measured: Inspector(model).summary(batch), or run_inspection(..., costs=True), does"


# As text.


def render(
    report: HealthReport,
    *,
    depth: int | None = None,
    max_rows: int | None = MAX_ROWS,
    width: int = 100,
) -> str:
    """Return the summary of a report as text; arguments as in `summarised` and `text`."""
    return text(summarised(report, depth, max_rows), width=width)


def text(summary: ModelSummary, *, width: int = 100) -> str:
    """Return the tree of layers as a table, and the totals below.

    Each line has the numbers of a layer with all inside.

    Args:
        summary: what to show.
        width: characters that a line may take; names, types and remarks are cut to fit.
    """
    lines, left_out = selected(summary)
    columns = [column for column in COLUMNS if column.title != "input" or width >= _WIDE]
    body = _table(lines, columns, width)
    if left_out:
        body.append(f"... and {plural(left_out, 'more line')}: summary(max_rows=None) shows all")
    notes = [printable(note) for note in summary.notes]
    head = line(summary)
    return "\n".join([head, "", *(body or ["no layers"]), "", *facts(summary), *notes])


_WIDE = 120
"""From here on there is room for the shapes of inputs."""


def line(summary: ModelSummary) -> str:
    """Return what was summarised, in one line."""
    found = summary.totals
    parts = [plural(found["layers"] or 0, "layer")]
    if found["parameters"] is not None:
        parts.append(plural(found["parameters"], "parameter"))
    parts += [summary.run] if summary.run else []
    return f"{printable(summary.model_type)}: {', '.join(parts)}"


def selected(summary: ModelSummary) -> tuple[list[Row | Alike], int]:
    """Return the lines to show, and how many more there are."""
    roots: list[Branch] = []
    path: list[Branch] = []
    for row in summary.rows:
        branch = Branch(dict(row))
        del path[row["depth"] :]
        (path[-1].inside if path else roots).append(branch)
        path.append(branch)
    lines = list(shown(roots, summary.depth))
    most = len(lines) if summary.max_rows is None else summary.max_rows
    return lines[:most], max(0, len(lines) - most)


@dataclass(frozen=True)
class Column:
    """One column of the table.

    Args:
        title: what stands over it.
        help: what it holds, in a sentence.
        cell: gives its text for a layer.
        is_text: whether it is flush left.
    """

    title: str
    help: str
    cell: Callable[[Row], str]
    is_text: bool = False


def _shape(row: Row, key: str) -> str:
    return NOT_SEEN if row[key] is None else shape(row[key])


def _remark(row: Row) -> str:
    parts = []
    if row["status"] == Status.OPAQUE:
        parts.append("not looked into")
    elif not row["calls"] and not row["all_activation_bytes"]:
        parts.append("never called")
    if row["calls"] > 1:
        parts.append(plural(row["calls"], "call"))
    if row["frozen"]:
        parts.append("frozen" if not row["trainable"] else f"{row['frozen']:,} frozen")
    if row["shared"]:
        parts.append("tied")
    return ", ".join(parts)


COLUMNS = (
    Column(
        "layer",
        "name of the layer, below the layer that it lies in",
        lambda row: "  " * row["depth"] + printable(row["name"].rpartition(".")[2] or row["label"]),
        is_text=True,
    ),
    Column(
        "type", "class of the module, or the function", lambda row: printable(row["type"]), True
    ),
    Column("input", "shape of the first input", lambda row: _shape(row, "input_shape")),
    Column("output", "shape of the first output", lambda row: _shape(row, "output_shape")),
    Column(
        "params",
        "elements of all parameters, shared ones once",
        lambda row: whole(row["all_parameters"]),
    ),
    Column(
        "mult-adds",
        "multiplications with an addition in the forward, half of the operations that torch counts",
        lambda row: scaled(row["all_multiply_adds"]),
    ),
    Column(
        "activations",
        "bytes of what was returned, by the innermost layers",
        lambda row: in_bytes(row["all_activation_bytes"]),
    ),
    Column(
        "saved",
        "bytes that autograd keeps for the backward pass, beyond parameters and batch",
        lambda row: in_bytes(row["all_saved_bytes"]),
    ),
    Column("", "what is special", _remark, is_text=True),
)


def whole(count: int | None) -> str:
    """Return ``"1,234,567"``, or a dash where nothing was counted."""
    return NOT_SEEN if count is None else f"{count:,}"


def scaled(count: int | None) -> str:
    """Return ``"376 k"``, ``"4.21 G"``: three significant digits and a power of 1,000."""
    return NOT_SEEN if count is None else _in_units(count, 1000, ("", " k", " M", " G", " T", " P"))


def in_bytes(count: int | None) -> str:
    """Return ``"64.0 KiB"``: three significant digits and a power of 1,024."""
    units = (" B", " KiB", " MiB", " GiB", " TiB", " PiB")
    return NOT_SEEN if count is None else _in_units(count, 1024, units)


def _in_units(count: int, base: int, units: Sequence[str]) -> str:
    power, value = 0, float(count)
    while value >= 999.5 and power < len(units) - 1:
        value /= base
        power += 1
    digits = 0 if not power or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:,.{digits}f}{units[power]}"


def _table(lines: Sequence[Row | Alike], columns: Sequence[Column], width: int) -> list[str]:
    """Return the lines of the table, in `width` characters where numbers leave that room."""
    cells = [[column.title for column in columns]]
    cells += [
        [column.cell(row) for column in columns] for row in lines if not isinstance(row, Alike)
    ]
    if len(cells) == 1:
        return []
    texts = {index for index, column in enumerate(columns) if column.is_text}
    titles, *found = table(_fitted(cells, width), left=texts)
    body, remaining = [titles], iter(found)
    for row in lines:
        body.append(shorten(alike(row), width) if isinstance(row, Alike) else next(remaining))
    return body


def alike(left_out: Alike) -> str:
    """Return a line for siblings that are like those before."""
    first, last = (printable(name.rpartition(".")[2]) for name in (left_out.first, left_out.last))
    layers = plural(left_out.layers, "layer")
    return f"{'  ' * left_out.depth}{first} .. {last}: {left_out.times:,} times the same ({layers})"


_NARROWEST = ((1, 12), (0, 32), (1, 8), (-1, 6), (0, 16), (-1, 0))
"""Columns that give way when the table is too wide, in this order, and how far."""


def _fitted(cells: list[list[str]], width: int) -> list[list[str]]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    excess = sum(widths) + 2 * (len(widths) - 1) - width
    for column, least in _NARROWEST:
        cut = max(0, min(excess, widths[column] - least))
        widths[column] -= cut
        excess -= cut
    cut_at = {column: widths[column] for column in (0, 1, len(widths) - 1)}
    return [
        [shorten(cell, cut_at[at]) if at in cut_at else cell for at, cell in enumerate(row)]
        for row in cells
    ]


def facts(summary: ModelSummary) -> list[str]:
    """Return the totals, a line each."""
    found = summary.totals
    lines = [
        (
            "parameters",
            f"{whole(found['parameters'])} ({in_bytes(found['parameter_bytes'])}): "
            f"{whole(found['trainable'])} trainable, {whole(found['frozen'])} frozen",
        ),
        (
            "mult-adds",
            f"{scaled(found['multiply_adds'])} in the forward, by the counter of torch (2 flops each)",
        ),
        ("activations", f"{in_bytes(found['activation_bytes'])} returned by the innermost layers"),
        (
            "saved",
            f"{in_bytes(found['saved_bytes'])} for the backward pass, beyond parameters and batch",
        ),
        (
            "peak",
            f"{in_bytes(found['peak_bytes'])} of tensors in {_phases(summary)}, "
            f"{in_bytes(found['held_bytes'])} of it model and batch",
        ),
        ("CUDA's peak", f"{in_bytes(found['cuda_peak_bytes'])} by its allocator"),
    ]
    if found["peak_bytes"] is None:
        lines = [one for one in lines if one[0] in ("parameters", "activations")]
    elif found["cuda_peak_bytes"] is None:
        lines.pop()
    tied = [("tied", text) for text in _ties(summary.rows)]
    return table([*lines, *tied], left=(0, 1))


def _ties(layers: Sequence[Row]) -> list[str]:
    """Return which parameters are shared, at most so many that they do not fill the page."""
    pairs = [
        f"{printable(row['name'] + '.' * bool(row['name']) + own)} is {printable(full)}"
        for row in layers
        for own, full in row["shared"].items()
    ]
    return [*pairs[:_TIES], *([f"and {len(pairs) - _TIES:,} more"] if len(pairs) > _TIES else [])]


_TIES = 5


def _phases(summary: ModelSummary) -> str:
    return "forward, loss and backward" if summary.backward else "the forward"


def to_dict(summary: ModelSummary) -> dict[str, Any]:
    """Return a summary as dictionaries, lists, numbers, strings and ``None``."""
    data = {
        "model_type": summary.model_type,
        "run": summary.run,
        "backward": summary.backward,
        "totals": summary.totals,
        "notes": summary.notes,
        "rows": summary.rows,
    }
    plain: dict[str, Any] = json.loads(json.dumps(data))
    return plain
