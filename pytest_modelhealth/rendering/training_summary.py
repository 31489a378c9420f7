"""A training as text: one line on all of it, then the layers to look at first."""

from __future__ import annotations

import math

from pytest_modelhealth.rendering.notation import number, percent, plural, table
from pytest_modelhealth.rendering.progress import headline, layer_label, remarks, shown
from pytest_modelhealth.training.monitoring.history import History
from pytest_modelhealth.training.monitoring.row import Event

_COLUMNS = {
    "p.grad": ("parameter_gradient_norm", number),
    "update": ("update_ratio", number),
    "act.std": ("activation_std", number),
    "dead": ("dead_fraction", percent),
}


def summary(history: History, k: int = 10, worst: Event | None = None) -> str:
    """Return the headline, and a table of `k` layers in the latest watched step.

    First come those that stand out, the gravest first, then those with the largest gradients of
    parameters. ``p.grad`` is the norm of these, ``update`` the update ratio. The headline names
    `worst`, the gravest thing that rules object to, where there is one.
    """
    if not len(history):
        return headline(history, worst)
    found = {remark.layer: remark for remark in remarks(history)}
    are_shown = [
        layer for layer, is_shown in zip(history.layers, shown(history), strict=True) if is_shown
    ]
    gradients = history["parameter_gradient_norm"][-1]
    largest = dict(zip(history.layers, gradients, strict=True))
    others = sorted(
        (layer for layer in are_shown if layer not in found),
        key=lambda layer: -1.0 if math.isnan(largest[layer]) else largest[layer],
        reverse=True,
    )
    listed = [*found, *others]
    rows = [["layer", *_COLUMNS, ""]]
    for layer in listed[:k]:
        at = history.layers.index(layer)
        cells = [form(_or_none(history[name][-1, at])) for name, form in _COLUMNS.values()]
        if history["parameter_gradient_nonfinite"][-1, at] > 0:
            cells[0] = "NaN/inf"
        remark = found.get(layer)
        note = f"{remark.text} since step {remark.since}" if remark else ""
        rows.append([layer_label(layer), *cells, note])
    lines = [headline(history, worst), "", *(f"  {line}" for line in table(rows, left=(0, 5)))]
    if len(listed) > k:
        lines.append(f"  and {plural(len(listed) - k, 'layer')} more")
    return "\n".join(lines)


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else float(value)
