"""What there is to say of a training through time: which layers went wrong, and since when."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pytest_modelhealth.rendering.charts.course import BAND, MOST_DEAD
from pytest_modelhealth.rendering.document import Document, Row
from pytest_modelhealth.rendering.notation import (
    Column,
    abbreviate,
    number,
    percent,
    plural,
    printable,
)
from pytest_modelhealth.training.monitoring.history import History
from pytest_modelhealth.training.monitoring.row import Event

Flags = npt.NDArray[np.bool_]

_SLOW = 5
"""Rank of a layer that hardly moves, as all do at the end of a schedule."""


class Remark(NamedTuple):
    """What stands out at a layer in the latest watched step.

    Args:
        rank: how grave it is, 0 the gravest.
        since: the watched step since which it is so.
        place: the layer's place in execution order; before all where the first value that is no
            number came from.
        layer: its name.
        text: what it is.
    """

    rank: int
    since: int
    place: int
    layer: str
    text: str


def layer_label(layer: str) -> str:
    """Return a layer's name as it is shown; the model itself has none."""
    return abbreviate(printable(layer), 40) or "(model)"


def shown(history: History) -> Flags:
    """Return which layers are shown: not those that hold others, unless they own parameters."""
    layers = history.layers
    holders = {name.rpartition(".")[0] for name in layers if name}
    owns = np.isfinite(history["parameter_norm"]).any(axis=0)
    return np.array([layer not in holders for layer in layers], dtype=bool) | owns


def remarks(history: History) -> list[Remark]:
    """Return what stands out at the end of the training, the gravest and earliest first."""
    if not len(history):
        return []
    dead, ratio = history["dead_fraction"], history["update_ratio"]
    kinds = ("activation", "gradient", "parameter", "parameter_gradient")
    states = (
        (np.any([history[f"{kind}_nonfinite"] > 0 for kind in kinds], axis=0), "not finite"),
        (dead >= 1, "all units dead"),
        (dead > MOST_DEAD, "{dead} of the units dead"),
        (history["parameter_gradient_norm"] == 0, "gradient zero"),
        (ratio > 10 * BAND[1], "update ratio {ratio}, usual is up to 1e-2"),
        ((ratio < BAND[0] / 10) & (ratio > 0), "update ratio {ratio}, usual is from 1e-4"),
    )
    found: dict[str, Remark] = {}
    are_shown, steps, first = shown(history), history.steps, history.first_origin
    for rank, (flags, text) in enumerate(states):
        for place in np.flatnonzero(flags[-1] & are_shown):
            layer = history.layers[place]
            said = text.format(dead=percent(dead[-1, place]), ratio=number(ratio[-1, place]))
            false = np.flatnonzero(~flags[:, place])
            since = int(steps[false[-1] + 1 if len(false) else 0])
            is_origin = rank == 0 and first is not None and first[1].layer == layer
            order = -1 if is_origin else int(place)
            found.setdefault(layer, Remark(rank, since, order, layer, f"{said} since step {since}"))
    return sorted(found.values())


def headline(history: History, worst: Event | None = None) -> str:
    """Return one line: how many steps, the loss from where to where, the worst layer.

    Args:
        history: the watched steps.
        worst: the gravest thing that rules object to; ``None`` looks at the latest step.
    """
    if not len(history):
        return f"training of {printable(history.model_type)}: no step was watched yet"
    steps, loss = history.steps, history.loss
    parts = [f"{plural(history.watched, 'step')} watched ({steps[0]} to {steps[-1]})"]
    known, origin = loss[~np.isnan(loss)], history.first_origin
    if len(known):
        last = loss[-1] if np.isnan(loss[-1]) and origin is not None else known[-1]
        parts.append(f"loss {number(known[0])} to {number(last)}")
    if worst is not None:
        where = layer_label(worst.layer)
        parts.append(f"worst, from step {worst.step} on: {where}: {printable(worst.text)}")
    else:
        grave = [one for one in remarks(history) if one.rank < _SLOW]
        told = [f"worst: {layer_label(one.layer)}: {one.text}" for one in grave]
        parts.append(told[0] if told else "no layer stands out at the end")
        parts += [f"step {origin[0]}: {printable(str(origin[1]))}"] if origin is not None else []
    return f"training of {printable(history.model_type)}: {'; '.join(parts)}"


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
    layers, are_shown = history.layers, shown(history)
    found = {remark.layer: remark.text for remark in remarks(history)}
    gradients = np.nan_to_num(history["parameter_gradient_norm"][-1], nan=-1.0)
    order = np.argsort(-gradients, kind="stable").tolist()
    others = [at for at in order if are_shown[at] and layers[at] not in found]
    listed = [*map(layers.index, found), *others]
    rows = []
    for at in listed[:k]:
        values = ((form, float(history[name][-1, at])) for name, form in _COLUMNS.values())
        cells = [form(None if math.isnan(value) else value) for form, value in values]
        if history["parameter_gradient_nonfinite"][-1, at] > 0:
            cells[0] = "NaN/inf"
        rows.append(Row([layer_label(layers[at]), *cells, found.get(layers[at], "")]))
    titles = ["layer", *_COLUMNS, ""]
    columns = [Column(title, "", str, title in ("layer", "")) for title in titles]
    rest = f"  and {plural(len(listed) - k, 'layer')} more" if len(listed) > k else ""
    return Document(
        headline(history, worst), columns=columns, rows=rows, rest=rest, indent="  "
    ).text()
