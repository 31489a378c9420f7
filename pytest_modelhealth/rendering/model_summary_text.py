"""The summary of a model as text and HTML: the tree of layers, and the totals below."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pytest_modelhealth.rendering.notation import (
    NOT_SEEN,
    plural,
    printable,
    shape,
    shorten,
    table,
)
from pytest_modelhealth.rendering.template import template
from pytest_modelhealth.report import ModelSummary, Status

Row = Mapping[str, Any]

_LONGEST_PERIOD = 8
"""Of siblings in turns (linear, norm, ReLU, linear, ...) so many are taken for one block."""

_WIDE = 120
"""Characters from which on there is room for the shapes of inputs."""

_NARROWEST = ((1, 12), (0, 28), (-1, 8), (1, 8), (0, 16))
"""Columns that give way when the table is too wide, in this order, and how far."""

_TIES = 5


def text(summary: ModelSummary, *, width: int = 100) -> str:
    """Return the tree of layers as a table, and the totals below.

    Each line has the numbers of a layer with all inside.

    Args:
        summary: what to show.
        width: characters that a line may take; names, types and remarks are cut to fit.
    """
    lines, left_out = _selected(summary)
    columns = [column for column in COLUMNS if column.title != "input" or width >= _WIDE]
    cells = [[column.title for column in columns]]
    cells += [[column.cell(row) for column in columns] for row in lines if not isinstance(row, str)]
    texts = {index for index, column in enumerate(columns) if column.is_text}
    narrowest = [(column % len(columns), least) for column, least in _NARROWEST]
    titles, *found = table(cells, texts, width=width, narrowest=narrowest)
    layers = iter(found)
    body = [shorten(row, width) if isinstance(row, str) else next(layers) for row in lines]
    if left_out:
        body.append(f"... and {plural(left_out, 'more line')}: summary(max_rows=None) shows all")
    notes = [printable(note) for note in summary.notes]
    shown = [titles, *body] if body else ["no layers"]
    return "\n".join([line(summary), "", *shown, "", *facts(summary), *notes])


def line(summary: ModelSummary) -> str:
    """Return what was summarised, in one line."""
    found = summary.totals
    parts = [plural(found["layers"] or 0, "layer")]
    if found["parameters"] is not None:
        parts.append(plural(found["parameters"], "parameter"))
    parts += [summary.run] if summary.run else []
    return f"{printable(summary.model_type)}: {', '.join(parts)}"


def _selected(summary: ModelSummary) -> tuple[list[Row | str], int]:
    """Return the lines to show, and how many more there are."""
    lines = list(_shown(summary.rows, summary.depth))
    most = len(lines) if summary.max_rows is None else summary.max_rows
    return lines[:most], max(0, len(lines) - most)


def _shown(rows: Sequence[Row], depth: int | None) -> Iterator[Row | str]:
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


def _shape(sizes: Sequence[int] | None) -> str:
    return NOT_SEEN if sizes is None else shape(sizes)


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
    Column("input", "shape of the first input", lambda row: _shape(row["input_shape"])),
    Column("output", "shape of the first output", lambda row: _shape(row["output_shape"])),
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


def fragment(summary: ModelSummary) -> str:
    """Return a self-contained ``<div>``; every name in it is escaped."""
    lines, left_out = _selected(summary)
    html: str = template("model_summary.html").render(
        line=line(summary),
        facts=facts(summary),
        notes=summary.notes,
        columns=COLUMNS,
        lines=[
            {"alike": row.strip(), "depth": (len(row) - len(row.lstrip())) // 2}
            if isinstance(row, str)
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
