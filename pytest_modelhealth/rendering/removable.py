"""The units that can go as text and as a fragment of HTML."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_modelhealth.removal.result import RemovableUnits
from pytest_modelhealth.rendering.document import Document, Row
from pytest_modelhealth.rendering.notation import (
    Column,
    abbreviate,
    percent,
    plural,
    printable,
    shorten,
    whole,
)

_FEW = 32  # samples below which many a unit is silent by chance
_NAME, _INDICES = 44, 44  # characters of a name and of a list of indices in the table

_COLUMNS = (
    Column("layer", "fully qualified name", lambda one: abbreviate(_label(one.name), _NAME), True),
    Column("units", "how many the layer has", lambda one: whole(one.units)),
    Column("inactive", "no output depends on them", lambda one: whole(len(one.inactive))),
    Column("duplicate", "the weights of a twin", lambda one: whole(len(one.duplicates))),
    Column("go", "part that can go", lambda one: percent(one.fraction)),
    Column("which", "indices", lambda one: shorten(_ranges(one.removable), _INDICES), True),
)


def document(result: RemovableUnits) -> Document:
    """Return how many units can go, a table of layers, the proof, and what was refused."""
    model = printable(result.report.observation.model_type)
    going = sum(len(layer.removable) for layer in result.layers.values())
    line = f"{model}: {going or 'none':} of {plural(sum(result.sizes.values()), 'unit')} can go"
    if not result.sizes:
        line = f"{model}: no units to look at, as no linear layer or convolution ran but those "
        line += "that give outputs"
    rows = [
        Row([c.cell(one) for c in _COLUMNS], help=_ranges(one.removable), name=_label(one.name))
        for one in result.layers.values()
    ]
    masked = ""
    if any(layer.inactive for layer in result.layers.values()):
        masked = "; with the inactive ones masked, each output there is the same, bit for bit"
    on = f"{plural(result.samples, 'sample')}, and on {result.held_out_samples:,} held-out ones"
    remarks = ["", f"looked for on {on}{masked}"]
    if result.samples < _FEW:
        remarks.append(f"{plural(result.samples, 'sample')} are few: over more, more units fire")
    remarks += [f"not removable: {_label(n)}: {why}" for n, why in result.refused.items()]
    return Document(line, columns=_COLUMNS, rows=rows, remarks=remarks)


def _label(name: str) -> str:
    return printable(name) or "the model"


def _ranges(indices: Sequence[int]) -> str:
    """Return sorted indices with neighbours joined: ``"0, 4-7, 9"``."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
