"""A training through time: what there is to say of it as text, and its layers as a figure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import starmap
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pytest_modelhealth.rendering.document import Document, Row
from pytest_modelhealth.rendering.notation import (
    Column,
    abbreviate,
    number,
    percent,
    plural,
    printable,
    shorten,
)
from pytest_modelhealth.training.monitoring.history import History
from pytest_modelhealth.training.monitoring.row import Event

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def layer_label(layer: str) -> str:
    """Return a layer's name as it is shown; the model itself has none."""
    return abbreviate(printable(layer), 40) or "(model)"


def shown(history: History) -> npt.NDArray[np.bool_]:
    """Return which layers are shown: not those that hold others, unless they own parameters."""
    layers = history.layers
    holders = {name.rpartition(".")[0] for name in layers if name}
    owns = np.isfinite(history["parameter_norm"]).any(axis=0)
    return np.array([layer not in holders for layer in layers], dtype=bool) | owns


def headline(history: History, worst: Event | None = None) -> str:
    """Return one line: how many steps, the loss from where to where, the worst layer."""
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
    elif origin is not None:
        parts.append(f"step {origin[0]}: {printable(origin[1].message)}")
    return f"training of {printable(history.model_type)}: {'; '.join(parts)}"


_COLUMNS = {
    "p.grad": ("parameter_gradient_norm", number),
    "update": ("update_ratio", number),
    "act.std": ("activation_std", number),
    "dead": ("dead_fraction", percent),
}


def document(history: History, k: int = 10, worst: Event | None = None) -> Document:
    """Return the headline, and a table of `k` layers in the latest watched step.

    First come those with values that are not finite, then those with the most dead units, then
    those with the largest gradients of parameters. ``p.grad`` is the norm of these, ``update`` the
    update ratio. The headline names `worst`, the gravest thing that rules object to.
    """
    if not len(history):
        return Document(headline(history, worst))
    bad = history["parameter_gradient_nonfinite"][-1] + history["activation_nonfinite"][-1]
    ranks = (history["parameter_gradient_norm"][-1], history["dead_fraction"][-1], bad > 0)
    order = np.lexsort([-np.nan_to_num(rank.astype(float), nan=-1.0) for rank in ranks])
    # of a long history each statistic costs: once
    is_shown = shown(history)
    listed = [at for at in order.tolist() if is_shown[at]]
    latest = [(form, history[name][-1]) for name, form in _COLUMNS.values()]
    lost, rows = history["parameter_gradient_nonfinite"][-1] > 0, []
    for at in listed[:k]:
        values = ((form, float(column[at])) for form, column in latest)
        cells = [form(None if math.isnan(value) else value) for form, value in values]
        if lost[at]:
            cells[0] = "NaN/inf"
        rows.append(Row([layer_label(history.layers[at]), *cells]))
    return Document(
        headline(history, worst),
        columns=[Column(title, is_text=title == "layer") for title in ("layer", *_COLUMNS)],
        rows=rows,
        below=[f"  and {plural(more, 'layer')} more"] if (more := len(listed) - k) > 0 else [],
        indent="  ",
    )


_MOST_EVENTS = 8  # that are told above a figure


def plot_training(
    history: History, events: Iterable[tuple[int, str, str]] = (), worst: Event | None = None
) -> Figure:
    """Return a figure of a training: the loss, gradient norms, dead units and update ratios.

    Layers stand in execution order. A layer that holds others has a row only where it owns
    parameters. Where steps share a column, the worst of them is shown: what is not finite first,
    then what is farthest from the rest.

    Each of `events` is a step, a layer and a text: a line through all panels, the name of the layer
    in red, the text above. `worst` is the gravest, for the line at the top.
    """
    from pytest_modelhealth.rendering.charts.course import MOST_COLUMNS, course
    from pytest_modelhealth.rendering.figures import figure_of

    listed = sorted(starmap(Event, events), key=lambda event: event.step)
    chart = course(course_of(history), "", [event[:2] for event in listed])
    said = [headline(history, worst).partition(": ")[2]]
    if (every := -(-len(history) // MOST_COLUMNS)) > 1:
        said.append(f"a column is {every} watched steps, the worst shown")
    alarms = [
        f"{at}  step {event.step}, {layer_label(event.layer)}: {shorten(event.text, 110)}"
        for at, event in enumerate(listed[:_MOST_EVENTS], start=1)
    ]
    more = len(listed) - _MOST_EVENTS
    alarms += [f"and {more} more"] * (more > 0)
    return figure_of(chart, f"training of {shorten(history.model_type, 36)}", said, alarms)


def course_of(history: History) -> dict[str, Any]:
    """Return what a figure shows of a training, by the keys of the file of a run."""
    from pytest_modelhealth.rendering.recorded import course_data

    has_gradients = np.isfinite(history["parameter_gradient_norm"]).any()
    norm = "parameter_gradient_norm" if has_gradients else "gradient_norm"
    statistics, layers = (norm, "dead_fraction", "update_ratio"), np.flatnonzero(shown(history))
    return course_data(history, statistics, layers.tolist(), range(len(history)))
