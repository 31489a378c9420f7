"""A comparison of two models as text and as data, and a drift from a snapshot."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from pytest_modelhealth.alignment.result import Change, listed
from pytest_modelhealth.comparison.comparison import Comparison
from pytest_modelhealth.comparison.results import TensorResult
from pytest_modelhealth.rendering.document import LINES, Document, Row
from pytest_modelhealth.rendering.notation import (
    NOT_SEEN,
    Column,
    few,
    number,
    plural,
    printable,
    shorten,
)
from pytest_modelhealth.rendering.recorded import comparison_data
from pytest_modelhealth.report.codec import encode
from pytest_modelhealth.report.flow import near
from pytest_modelhealth.snapshot.changes import phrases
from pytest_modelhealth.snapshot.drift import DriftReport

_ROLES = (("activations", "buffers"), ("gradients", "parameter_gradients"))
"""Of the two columns of errors: forward and backward."""

MOST_ROWS = 9
MOST_NOTES = 4
MOST_NAMES = 4
MOST_TENSORS = 8
MOST_CHANGES = 6


def line(comparison: Comparison) -> str:
    """Return verdict, culprit and what it rests on, in one line."""
    found = comparison.first_divergence
    if found is not None:
        why = ": ".join(filter(None, (found.story, found.cause)))
        return printable(f"not equivalent: {found.label}: {why}")
    layers = [layer for layer in comparison.layers.values() if layer.tensors]
    compared = "its outputs alone: no layer inside was compared"
    if layers and (any(layer.name for layer in layers) or len(comparison.layers) == 1):
        compared = plural(len(layers), "layer")
    return printable(
        f"equivalent by {comparison.basis}: {comparison.candidate} computes what "
        f"{comparison.reference} does, in {compared}"
    )


def failure(comparison: Comparison, width: int | None = None) -> str:
    """Return at most a screenful; its first line is the verdict and the culprit."""
    found = comparison.first_divergence
    if found is None:
        return line(comparison)
    evidence = [] if found.result is None else [*_evidence(found.result, comparison.reference)]
    affected = len(found.affected)
    others = f"{plural(affected, 'other layer')} only {'shows' if affected == 1 else 'show'}"
    limit = math.nan if found.result is None else found.result.limit
    code = [f"verdict by:   {comparison.basis}, times {limit:g}"]
    ours, theirs = (printable(near(place)) if place else "" for place in found.called_at)
    if ours or theirs:
        there = f", in the candidate {theirs}" if ours and theirs not in ("", ours) else ""
        code.append(f"called at:    {ours or theirs}{there}")
    code += [*_remarks(comparison), "look:         print(comparison), comparison.plot_errors()"]
    return replace(
        document(comparison),
        facts=["", *(f"  {text}" for text in evidence)] if evidence else [],
        most=MOST_ROWS,
        below=[f"  {others} what began in {printable(found.label)}"] if affected else [],
        code=code,
        indent="  ",
    ).text(width=width, lines=LINES)


def document(comparison: Comparison) -> Document:
    """Return the verdict and the layers that there is something to say of, in execution order.

    What is near the culprit weighs most.
    """
    found = comparison.first_divergence
    layers = [
        layer
        for layer in comparison.layers.values()
        if layer.tensors
        or (layer.pair.change is not Change.MATCHED and not layer.pair.is_out_of_sight)
    ]
    names = [layer.name for layer in layers]
    first = found.result.key.layer if found is not None and found.result is not None else ""
    at = names.index(first) if first in names else 0
    rows = []
    for place, layer in enumerate(layers):
        is_culprit = found is not None and layer.name == found.layer
        mark = "!" if is_culprit else "~" if layer.diverged else ""
        kind = {"!": "violated", "~": "warned"}.get(mark, "")
        errors = [cell for roles in _ROLES for cell in _cells(layer.worst(*roles))]
        cells = [*map(printable, (layer.label, layer.pair.word)), *errors]
        rows.append(Row(cells, kind, mark=mark, weight=-abs(place - at)))
    titles = ("layer", "is now", "forward", "x noise", "gradient", "x noise")
    return Document(
        line(comparison),
        facts=[*_remarks(comparison)],
        columns=[Column(title, is_text=title in ("layer", "is now")) for title in titles],
        rows=rows,
        narrowest=((0, 32), (1, 20), (0, 10), (1, 6)),
        names=0,
        marks=True,
    )


def _evidence(result: TensorResult, model: str) -> Iterator[str]:
    """Yield how far the first tensor that diverged is off, and where most."""
    off, ratio, key = result.difference, result.ratio, result.key
    layer = printable(key.layer or model)
    what = {
        "outputs": f"output {key.number} of {layer}",
        "parameter_gradients": f"gradient of {layer}.{key.tensor}",
        "buffers": f"{layer}.{key.tensor} after the step",
    }.get(key.role, f"{key.role} of {layer}")
    if off is None:
        yield f"{what}: {result.problem}"
        return
    times = f"{ratio:,.{1 if ratio < 100 else 0}f} times" if math.isfinite(ratio) else "more than"
    yield (
        f"{what}: {off.unequal:,} of {off.count:,} elements differ, by {times} the natural "
        f"noise (limit {result.limit:g})"
    )
    if off.nonfinite:
        yield (
            f"NaN: {off.nan_candidate:,} in the candidate only, {off.nan_reference:,} in the "
            f"reference only; infinite on one side only: {off.other_infinities:,}"
            + ("" if off.at is None else f"; the first at {list(off.at)}")
        )
    elif off.at is not None:
        yield (
            f"most at {list(off.at)}: {off.found:.6g} instead of {off.expected:.6g}; relative L2 "
            f"{number(off.relative_l2)}"
        )


def _cells(result: TensorResult | None) -> list[str]:
    """Return relative L2 error and its ratio to the noise."""
    if result is None:
        return [NOT_SEEN, NOT_SEEN]
    if result.difference is None or result.problem:
        return [shorten(result.problem.partition(":")[0], 10), "inf"]
    if not result.difference.unequal:
        return ["equal", "0"]
    return [number(result.difference.relative_l2), number(result.ratio)]


def _remarks(comparison: Comparison) -> Iterator[str]:
    """Yield which layers were not simply matched, and the notes."""
    alignment = comparison.alignment
    parts = []
    for change in (Change.RENAMED, Change.RETYPED, Change.MOVED, Change.INSERTED, Change.REMOVED):
        names = []
        for pair in alignment.of(change):
            is_other = pair.aligned and pair.candidate != pair.reference
            name = (pair.name or "the model") if pair.aligned else pair.name
            if not pair.reason or pair.aligned:
                names.append(f"{name} -> {pair.candidate}" if is_other else name)
        parts += [f"{len(names)} {change} ({listed(names, MOST_NAMES)})"] if names else []
    noted = [
        f"{pair.name} {pair.note}"
        for pair in alignment.pairs
        if pair.note and (pair.is_folded or not pair.folded_in)
    ]
    parts += [listed(noted, MOST_NAMES)] if noted else []
    if parts:
        yield f"alignment:    {printable('; '.join(parts))}"
    notes = [f"note:         {printable(shorten(note, 160))}" for note in comparison.notes]
    yield from few(notes, MOST_NOTES, "more note")


def to_dict(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as in the file of a run, with its verdict."""
    is_equivalent = comparison.first_divergence is None
    return {"equivalent": is_equivalent, **encode(comparison_data(comparison))}


def to_json(comparison: Comparison) -> str:
    """Return `to_dict` as strict JSON, ending in a newline: what is not finite is ``null``."""
    return json.dumps(to_dict(comparison), indent=1, allow_nan=False) + "\n"


def drift(report: DriftReport) -> list[str]:
    """Return the differences as lines, the verdict first; none where nothing may fail.

    The cause comes first, for people who have not seen the model for a year.
    """
    if not report.drifted:
        return []
    changes = phrases(change for change in report.changes if change.layer not in report.told)
    if not report.drifts:
        changes = phrases(report.failing_changes)[report.pair.has_common_layers :]
    story = [report.story] if report.story and not report.told else []
    if report.new_warnings:
        story = [*report.new_warnings[1:], report.moved, *story]
    titles = ("layer", "role", "statistic", "snapshot", "now", "moved")
    document = Document(
        report.headline,
        facts=[*story, *few(changes, MOST_CHANGES, "more change")],
        columns=[Column(title, is_text=n < 3) for n, title in enumerate(titles)],
        rows=[Row([d.label, d.role, d.statistic, d.before, d.now, d.moved]) for d in report.drifts],
        most=MOST_TENSORS,
        rest=lambda count: f"... and {count:,} more tensors after these",
        remarks=report.remarks,
        narrowest=((0, 20), (5, 20)),
        names=0,
    )
    lines = document.text(width=None, lines=LINES - 1).split("\n")  # besides how to accept it
    return [*map(printable, lines)]
