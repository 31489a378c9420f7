"""The summary of a model as text and HTML: the tree of layers, and the totals below."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pytest_modelhealth.rendering.layer_tree import Alike, Branch, Row, shown
from pytest_modelhealth.rendering.notation import (
    NOT_SEEN,
    fitted_widths,
    plural,
    printable,
    shape,
    shorten,
    table,
)
from pytest_modelhealth.rendering.template import template
from pytest_modelhealth.report import ModelSummary, Status


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
    body += [
        shorten(alike(row), width) if isinstance(row, Alike) else next(remaining) for row in lines
    ]
    return body


def alike(left_out: Alike) -> str:
    """Return a line for siblings that are like those before."""
    first, last = (printable(name.rpartition(".")[2]) for name in (left_out.first, left_out.last))
    layers = plural(left_out.layers, "layer")
    return f"{'  ' * left_out.depth}{first} .. {last}: {left_out.times:,} times the same ({layers})"


_NARROWEST = ((1, 12), (0, 28), (-1, 8), (1, 8), (0, 16))
"""Columns that give way when the table is too wide, in this order, and how far."""


def _fitted(cells: list[list[str]], width: int) -> list[list[str]]:
    widths = fitted_widths(cells, width, _NARROWEST)
    cut_at = {column: widths[column] for column in (0, 1, len(widths) - 1)}
    return [
        [shorten(cell, cut_at[at]) if at in cut_at else cell for at, cell in enumerate(row)]
        for row in cells
    ]


def facts(summary: ModelSummary) -> list[str]:
    """Return the totals, a line each; those that were not measured are left out."""
    found = summary.totals
    counts = {key: whole(found[key]) for key in ("parameters", "trainable", "frozen")}
    sizes = {key: in_bytes(number) for key, number in found.items() if key.endswith("_bytes")}
    lines = {
        "parameters": (
            f"{counts['parameters']} ({sizes['parameter_bytes']}): {counts['trainable']} "
            f"trainable, {counts['frozen']} frozen"
        ),
        "multiply_adds": (
            f"{scaled(found['multiply_adds'])} in the forward, by torch's counter (2 flops each)"
        ),
        "activation_bytes": f"{sizes['activation_bytes']} returned by the innermost layers",
        "saved_bytes": (
            f"{sizes['saved_bytes']} for the backward pass, beyond parameters and batch"
        ),
        "peak_bytes": (
            f"{sizes['peak_bytes']} of tensors in {_phases(summary)}, {sizes['held_bytes']} of it "
            "model and batch"
        ),
        "cuda_peak_bytes": f"{sizes['cuda_peak_bytes']} by CUDA's allocator",
    }
    listed = [(_TITLES[key], text) for key, text in lines.items() if found[key] is not None]
    tied = [("tied", text) for text in _ties(summary.rows)]
    return table([*listed, *tied], left=(0, 1)) if listed or tied else []


_TITLES = {
    "parameters": "parameters",
    "multiply_adds": "mult-adds",
    "activation_bytes": "activations",
    "saved_bytes": "saved",
    "peak_bytes": "peak",
    "cuda_peak_bytes": "peak",
}


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


def fragment(summary: ModelSummary) -> str:
    """Return a self-contained ``<div>``; every name in it is escaped."""
    lines, left_out = selected(summary)
    html: str = template("model_summary.html").render(
        line=line(summary),
        facts=facts(summary),
        notes=summary.notes,
        columns=COLUMNS,
        lines=[
            {"alike": alike(row).strip(), "depth": row.depth}
            if isinstance(row, Alike)
            else {
                "cells": [column.cell(row).strip() for column in COLUMNS],
                "name": row["label"],
                "reason": row["reason"],
                "depth": row["depth"],
            }
            for row in lines
        ],
        left_out=left_out,
    )
    return html
