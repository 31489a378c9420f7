"""A comparison of two models as text: one line, a table through depth, a failure; and as data."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from pytest_modelhealth.alignment.result import Change, Pair
from pytest_modelhealth.comparison.comparison import AlignedLayer, Comparison
from pytest_modelhealth.comparison.results import TensorResult
from pytest_modelhealth.rendering.notation import (
    NOT_SEEN,
    number,
    plural,
    printable,
    shorten,
    some,
    table,
)
from pytest_modelhealth.rendering.recorded import comparison_data
from pytest_modelhealth.report.codec import encode
from pytest_modelhealth.report.flow import near

FORWARD_ROLES = ("activations", "buffers")
BACKWARD_ROLES = ("gradients", "parameter_gradients")
MOST_ROWS = 9
MOST_NOTES = 4
MOST_NAMES = 4


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


def overview(comparison: Comparison) -> str:
    """Return the verdict and a line a layer, in execution order of the reference."""
    head = [line(comparison), *_alignment(comparison), *_notes(comparison)]
    layers = _layers(comparison)
    return "\n".join([*head, "", *_table(comparison, layers, 100)] if layers else head)


def _layers(comparison: Comparison) -> list[AlignedLayer]:
    """Return the layers that there is something to say of."""
    return [
        layer
        for layer in comparison.layers.values()
        if layer.tensors
        or (layer.pair.change is not Change.MATCHED and not layer.pair.is_out_of_sight)
    ]


def failure(comparison: Comparison) -> str:
    """Return at most a screenful: its first line is the verdict and the culprit."""
    found = comparison.first_divergence
    if found is None:
        return line(comparison)
    result, lines = found.result, [line(comparison), ""]
    if result is not None:
        lines += [f"  {text}" for text in _evidence(result, comparison.reference)] + [""]
    layers = _layers(comparison)
    names = [layer.name for layer in layers]
    at = names.index(result.key.layer) if result is not None and result.key.layer in names else 0
    start = max(0, min(at - MOST_ROWS // 2, len(layers) - MOST_ROWS))
    shown = layers[start : start + MOST_ROWS]
    lines += [f"  {row}" for row in _table(comparison, shown, 96)]
    if found.affected:
        others = plural(len(found.affected), "other layer")
        verb = "shows" if len(found.affected) == 1 else "show"
        lines.append(f"  {others} only {verb} what began in {printable(found.label)}")
    limit = math.nan if result is None else result.limit
    lines += ["", f"verdict by:   {comparison.basis}, times {limit:g}"]
    ours, theirs = (printable(near(place)) if place else "" for place in found.called_at)
    if ours or theirs:
        there = f", in the candidate {theirs}" if ours and theirs not in ("", ours) else ""
        lines.append(f"called at:    {ours or theirs}{there}")
    return "\n".join(
        [
            *lines,
            *_alignment(comparison),
            *_notes(comparison),
            "look:         print(comparison), comparison.plot_errors()",
        ]
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


def _table(comparison: Comparison, layers: Sequence[AlignedLayer], width: int) -> list[str]:
    found = comparison.first_divergence
    rows = [["", "layer", "is now", "forward", "x noise", "gradient", "x noise"]]
    for layer in layers:
        is_culprit = found is not None and layer.name == found.layer
        mark = "!" if is_culprit else "~" if layer.diverged else ""
        forward, backward = layer.worst(*FORWARD_ROLES), layer.worst(*BACKWARD_ROLES)
        names = map(printable, (layer.label, layer.pair.word))
        rows.append([mark, *names, *_cells(forward), *_cells(backward)])
    widest_name = max(16, (width - 44) * 3 // 5)
    widest = ((1, widest_name), (2, width - 44 - widest_name))
    return table(rows, (0, 1, 2), width=0, narrowest=widest, names=1)


def _cells(result: TensorResult | None) -> list[str]:
    """Return relative L2 error and its ratio to the noise."""
    if result is None:
        return [NOT_SEEN, NOT_SEEN]
    if result.difference is None or result.problem:
        return [shorten(result.problem.partition(":")[0], 10), "inf"]
    if not result.difference.unequal:
        return ["equal", "0"]
    return [number(result.difference.relative_l2), number(result.ratio)]


def _alignment(comparison: Comparison) -> Iterator[str]:
    """Yield which layers were not simply matched."""
    alignment = comparison.alignment
    parts = []
    for change in (Change.RENAMED, Change.RETYPED, Change.MOVED, Change.INSERTED, Change.REMOVED):
        pairs = [pair for pair in alignment.of(change) if not pair.reason or pair.aligned]
        if pairs:
            parts.append(f"{len(pairs)} {change} ({some(list(map(_names, pairs)), MOST_NAMES)})")
    noted = [
        f"{pair.name} {pair.note}"
        for pair in alignment.pairs
        if pair.note and (pair.is_folded or not (pair.folded_in or pair.word == "part"))
    ]
    parts += [some(noted, MOST_NAMES)] if noted else []
    if parts:
        yield f"alignment:    {printable('; '.join(parts))}"


def _names(pair: Pair) -> str:
    if not pair.aligned:
        return pair.name
    name = pair.name or "the model"
    return name if pair.candidate == pair.reference else f"{name} -> {pair.candidate}"


def _notes(comparison: Comparison) -> Iterator[str]:
    for note in comparison.notes[:MOST_NOTES]:
        yield f"note:         {printable(shorten(note, 160))}"
    yield from _more(len(comparison.notes) - MOST_NOTES, "note")


def _more(count: int, what: str) -> Iterator[str]:
    if count > 0:
        yield f"  ... and {plural(count, f'more {what}')}"


def to_dict(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as in the file of a run, with its verdict."""
    data: dict[str, Any] = {"equivalent": comparison.first_divergence is None}
    data |= encode(comparison_data(comparison))
    return data


def to_json(comparison: Comparison) -> str:
    """Return `to_dict` as strict JSON, ending in a newline: what is not finite is ``null``."""
    return json.dumps(to_dict(comparison), indent=1, allow_nan=False) + "\n"
