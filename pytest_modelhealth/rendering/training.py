"""A training as figures: all layers through time, or one layer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from pytest_modelhealth.rendering.charts.course import (
    BAND,
    MOST_COLUMNS,
    Cells,
    Lines,
    Values,
    course,
    timeline,
)
from pytest_modelhealth.rendering.figures import figure_of
from pytest_modelhealth.rendering.notation import power_of_two, shorten
from pytest_modelhealth.rendering.progress import (
    headline,
    layer_label,
    nonfinite,
    remarks,
    shown,
)
from pytest_modelhealth.training.monitoring.history import History
from pytest_modelhealth.training.monitoring.row import BINNED, EDGES, Event

Reals = npt.NDArray[np.float64]

_NAME_WIDTH = 36
"""Characters of a name."""

_MOST_EVENTS = 8


def plot_training(
    history: History, events: Iterable[tuple[int, str, str]] = (), worst: Event | None = None
) -> Figure:
    """Return a figure of a training: the loss, gradient norms, dead units and update ratios.

    Layers stand in execution order. A layer that holds others has a row only where it owns
    parameters. Where rows or columns are put together, the worst of them is shown: what is not
    finite first, then what is farthest from the rest.

    Args:
        history: the watched steps; there is at least one.
        events: what went wrong, each a step, a layer and a text: a line through all panels, a ring
            in the row of the layer, the text above.
        worst: the gravest of them, for the line at the top; ``None`` looks at the latest step.
    """
    listed = sorted(itertools.starmap(Event, events), key=lambda event: event.step)
    chart = course(course_of(history), "", [event[:2] for event in listed])
    said = [headline(history, worst).partition(": ")[2]]
    if (every := -(-len(history) // MOST_COLUMNS)) > 1:
        said.append(f"a column is {every} watched steps, the worst shown")
    name = shorten(history.model_type, _NAME_WIDTH)
    return figure_of(chart, f"training of {name}", said, _told(listed))


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
    return {"steps": history.steps.tolist(), "loss": _values(history.loss), "layers": layers}


def _told(events: list[Event]) -> list[str]:
    lines = [
        f"{at}  step {event.step}, {layer_label(event.layer)}: {shorten(event.text, 110)}"
        for at, event in enumerate(events[:_MOST_EVENTS], start=1)
    ]
    return lines + [f"and {len(events) - _MOST_EVENTS} more"] * (len(events) > _MOST_EVENTS)


def _values(values: Reals) -> Values:
    """Return numbers, ``None`` for those that are not finite."""
    return [float(value) if math.isfinite(value) else None for value in values]


# One layer

_PANELS: dict[str, dict[str, str]] = {
    "activations: mean, and a standard deviation to both sides": {"activation_mean": "mean"},
    "activations: scale": {
        "activation_abs_max": "largest magnitude",
        "activation_std": "standard deviation",
    },
    "dead units and zeros, part of all": {"dead_fraction": "dead units", "zero_fraction": "zeros"},
    "gradient norm": {
        "gradient_norm": "of activations",
        "parameter_gradient_norm": "of parameters",
    },
    "update ratio": {"update_ratio": "update ratio"},
}


def plot_layer(history: History, layer: str, events: Iterable[tuple[int, str, str]] = ()) -> Figure:
    """Return a figure of one layer through time; only panels that have something to show.

    Histograms, where they were kept, are columns of a map: the part of the values by sign and
    power of four, on a log scale.

    Args:
        history: the watched steps; there is at least one.
        layer: the layer's name.
        events: what went wrong, each a step, a layer and a text; those of this layer are marked.

    Raises:
        LayerNotFoundError: there is no such layer.
    """
    names = {name for panel in _PANELS.values() for name in panel}
    values = {name: history[layer, name] for name in (*names, "activation_std")}
    is_bad = nonfinite(history)[:, history.layers.index(layer)]
    for name, own in values.items():
        if name in ("dead_fraction", "zero_fraction"):
            own[history[layer, "activation_nonfinite"] > 0] = math.nan
            own[:] = own if (own > 0).any() else math.nan
        elif name != "update_ratio":
            own[is_bad & (own == 0)] = math.nan  # of no finite value
    panels: list[Lines | Cells] = []
    for title, labels in _PANELS.items():
        lines = {text: values[n] for n, text in labels.items() if np.isfinite(values[n]).any()}
        if lines:
            mean, std = (np.clip(values[f"activation_{n}"], -1e300, 1e300) for n in ("mean", "std"))
            is_update = "update_ratio" in labels
            panels.append(
                Lines(
                    title,
                    {text: _values(own) for text, own in lines.items()},
                    [_values(mean - std), _values(mean + std)]
                    if "activation_mean" in labels
                    else (),
                    is_log=is_update,
                    usual=BAND if is_update else None,
                )
            )
    for role in BINNED if history.has_histograms else ():
        bins = history.histograms(layer, role).astype(float)
        if np.isfinite(bins).any():
            panels.append(_histograms(role, bins))
    told = [f"{r.text} since step {r.since}" for r in remarks(history) if r.layer == layer]
    own_events = [event for event in itertools.starmap(Event, events) if event.layer == layer]
    own_events.sort(key=lambda event: event.step)
    chart = timeline(
        "layer", history.steps.tolist(), panels, [event.step for event in own_events],
        crosses=history.steps[is_bad].tolist(),
    )  # fmt: skip
    name = shorten(history.model_type, _NAME_WIDTH)
    title = f"{layer_label(layer)} in the training of {name}"
    return figure_of(chart, title, told, _told(own_events))


def _histograms(role: str, bins: Reals) -> Cells:
    """Return a column of bins for each step, from the most positive bin that was ever filled."""
    filled = np.flatnonzero(np.nan_to_num(bins).max(axis=0) > 0)
    middle = bins.shape[1] // 2
    least = max(1, min(abs(filled - middle)[filled != middle], default=1))
    # the bins nearer to zero than any value are left out
    keep = [b for b in range(filled[0], filled[-1] + 1) if b == middle or abs(b - middle) >= least]
    names = []
    for at in reversed(keep):
        place, sign = abs(at - middle), "-" * (at < middle)
        ends = [sign + power_of_two(int(np.log2(e))) for e in EDGES[max(place - 1, 0) : place + 1]]
        names.append([" .. ".join(ends) if place else "zero"])
    title = f"{role}: which part of the values, by sign and power of four"
    return Cells(title, names, bins[:, keep[::-1]].T, limits=(1e-4, 1.0), empty="")
