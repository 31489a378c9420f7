"""A training as a figure: all layers through time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import starmap
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from pytest_modelhealth.rendering.charts.course import MOST_COLUMNS, course
from pytest_modelhealth.rendering.figures import figure_of
from pytest_modelhealth.rendering.notation import shorten
from pytest_modelhealth.rendering.progress import headline, layer_label, shown
from pytest_modelhealth.training.monitoring.history import History
from pytest_modelhealth.training.monitoring.row import Event

_MOST_EVENTS = 8


def plot_training(
    history: History, events: Iterable[tuple[int, str, str]] = (), worst: Event | None = None
) -> Figure:
    """Return a figure of a training: the loss, gradient norms, dead units and update ratios.

    Layers stand in execution order. A layer that holds others has a row only where it owns
    parameters. Where steps share a column, the worst of them is shown: what is not finite first,
    then what is farthest from the rest.

    Args:
        history: the watched steps; there is at least one.
        events: what went wrong, each a step, a layer and a text: a line through all panels, a ring
            in the row of the layer, the text above.
        worst: the gravest of them, for the line at the top.
    """
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
    """Return what is drawn of a training; infinity stands for what was not finite."""
    has_gradients = np.isfinite(history["parameter_gradient_norm"]).any()
    kind = "parameter_gradient" if has_gradients else "gradient"
    dead, update = history["dead_fraction"], history["update_ratio"]
    after = history["parameter_nonfinite"] > 0
    following = np.concatenate([after[1:], history["parameter_gradient_nonfinite"][-1:] > 0])
    values = {}
    for name, is_bad in (
        (f"{kind}_norm", history[f"{kind}_nonfinite"] > 0),
        ("dead_fraction", (history["activation_nonfinite"] > 0) & ~np.isnan(dead)),
        ("update_ratio", after | (np.isnan(update) & following)),
    ):
        values[name] = np.where(is_bad | np.isinf(history[name]), np.inf, history[name])
    layers = {
        history.layers[at]: {name: own[:, at] for name, own in values.items()}
        for at in np.flatnonzero(shown(history))
    }
    loss = [float(value) if math.isfinite(value) else None for value in history.loss]
    return {"steps": history.steps.tolist(), "loss": loss, "layers": layers}
