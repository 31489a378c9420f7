"""The units that can go as text, as a fragment of HTML and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from pytest_modelhealth.removal.result import RemovableUnits
from pytest_modelhealth.rendering.document import Document, Row
from pytest_modelhealth.rendering.json import plain
from pytest_modelhealth.rendering.notation import (
    Column,
    abbreviate,
    number,
    percent,
    plural,
    printable,
    scaled,
    shorten,
    whole,
)

FORMAT_VERSION = 2
"""Raised when a key changes its name or meaning."""

_FEW = 32
"""Samples below which many a unit is silent by chance."""

_NAME, _INDICES = 34, 28
"""Characters of a name and of a list of indices in the table."""

_COLUMNS = (
    Column("layer", "fully qualified name", lambda one: abbreviate(_label(one.name), _NAME), True),
    Column("units", "how many the layer has", lambda one: whole(one.units)),
    Column("inactive", "always exactly zero", lambda one: whole(len(one.inactive))),
    Column("duplicate", "the values of a twin", lambda one: whole(len(one.duplicates))),
    Column("unread", "no output depends on them", lambda one: whole(len(one.unread))),
    Column("go", "part that can go", lambda one: "mask" if one.read_by else percent(one.fraction)),
    Column("params", "parameters they cost", lambda one: whole(one.parameters)),
    Column("mult-adds", "a sample", lambda one: scaled(one.multiply_adds).strip()),
    Column("which", "indices", lambda one: shorten(_ranges(one.removable), _INDICES), True),
)


def line(result: RemovableUnits) -> str:
    """Return how many units can go and what that saves, in one line."""
    name = printable(result.report.observation.model_type)
    if not result.sizes:
        return (
            f"{name}: no units to look at, as no linear layer or convolution ran but those that "
            "give outputs"
        )
    of, layers = plural(sum(result.sizes.values()), "unit"), result.layers.values()
    going = sum(len(layer.removable) for layer in layers if not layer.read_by)
    idle = sum(len(layer.removable) for layer in layers if layer.read_by)
    told = f"{'has' if idle == 1 else 'have'} no effect, to be masked"
    if not going:
        return f"{name}: {f'{idle:,} of {of} {told}' if idle else f'none of {of} can go'}"
    saved = []
    for part, whole_, what in (
        (result.parameters, result.of_parameters, "parameters"),
        (result.multiply_adds, result.of_multiply_adds, "multiply-adds"),
    ):
        if whole_ is not None:
            share = percent((part or 0) / whole_ if whole_ else 0.0)
            saved.append(f"{share} of its {scaled(whole_).strip()} {what}")
    more = f"; {idle:,} more {told}" if idle else ""
    return f"{name}: {going:,} of {of} can go: {', '.join(saved)}{more}"


def _document(result: RemovableUnits) -> Document:
    rows = [
        Row([c.cell(one) for c in _COLUMNS], help=_ranges(one.removable), name=_label(one.name))
        for one in result.layers.values()
    ]
    return Document(line(result), columns=_COLUMNS, rows=rows)


def text(result: RemovableUnits) -> str:
    """Return the line, a table of layers, the proof, and what was refused."""
    body = [_document(result).text(), "", *remarks(result)]
    if result.refused:
        body.append("looked removable, and is not:")
    body += [f"  {_label(name)}: {printable(why)}" for name, why in result.refused.items()]
    return "\n".join(body)


def fragment(result: RemovableUnits) -> str:
    """Return a self-contained ``<div>`` for notebooks; every name in it is escaped."""
    refused = [f"not removable: {_label(name)}: {why}" for name, why in result.refused.items()]
    return replace(_document(result), remarks=[*remarks(result), *refused]).html()


def remarks(result: RemovableUnits) -> list[str]:
    """Return how it was found and proven, a sentence each."""
    proof = result.proof
    found = f"found on {plural(result.samples, 'sample')}"
    on = f"on {proof.samples:,} held-out ones"
    if not result.layers:
        return [f"looked for on {plural(result.samples, 'sample')}, and {on}"]
    told = []
    if any(layer.masked for layer in result.layers.values()):
        told.append(f"{found}; with them masked, each output {on} is the same, bit for bit")
    if any(layer.duplicates for layer in result.layers.values()):
        told.append(
            f"duplicates merged, outputs {on} move by {number(proof.merged)} of their size; "
            f"rounding explains {number(proof.limit)}"
        )
    for layer in result.layers.values():
        if layer.read_by:
            count = len(layer.removable)
            told.append(
                f"{_label(layer.name)}: {plural(count, 'unit')} {'has' if count == 1 else 'have'} "
                f"no effect; to be masked, not cut: read by {printable(layer.read_by)}"
            )
    if result.samples < _FEW:
        told.append(f"{plural(result.samples, 'sample')} are few: over more, more units fire")
    return told


def _label(name: str) -> str:
    return printable(name) or "the model"


def _ranges(indices: Sequence[int]) -> str:
    """Return sorted indices with neighbours joined: ``"0, 4-7, 9"``."""
    found: list[list[int]] = []
    for index in indices:
        if found and index == found[-1][1] + 1:
            found[-1][1] = index
        else:
            found.append([index, index])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in found)


def to_dict(result: RemovableUnits) -> dict[str, Any]:
    """Return everything as dictionaries, lists, numbers, strings and ``None``."""
    layers = [
        asdict(layer) | {"removable": layer.removable, "fraction": layer.fraction}
        for layer in result.layers.values()
    ]
    data = {
        "format_version": FORMAT_VERSION,
        "model_type": result.report.observation.model_type,
        "layers": layers,
        "refused": result.refused,
        "sizes": result.sizes,
        "samples": result.samples,
        "proof": asdict(result.proof),
        "parameters": result.of_parameters,
        "multiply_adds": result.of_multiply_adds,
        "removable_parameters": result.parameters,
        "removable_multiply_adds": result.multiply_adds,
    }
    return {key: plain(value) for key, value in data.items()}
