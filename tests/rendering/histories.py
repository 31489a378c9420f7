"""Histories of trainings built by hand, row by row, for the tests of what shows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pytest_modelhealth.rendering import renderer
from pytest_modelhealth.report import Finding
from pytest_modelhealth.training.monitoring.history import History
from pytest_modelhealth.training.monitoring.row import STATISTICS, StepRow
from tests.rendering.reports import HOSTILE

USUAL = {
    "activation_mean": 0.1,
    "activation_std": 1.0,
    "activation_rms": 1.0,
    "activation_abs_max": 3.0,
    "zero_fraction": 0.4,
    "dead_fraction": 0.0,
    "activation_nonfinite": 0.0,
    "gradient_rms": 1e-3,
    "gradient_norm": 0.1,
    "gradient_nonfinite": 0.0,
    "parameter_norm": 5.0,
    "parameter_nonfinite": 0.0,
    "parameter_gradient_norm": 0.5,
    "parameter_gradient_nonfinite": 0.0,
    "update_norm": 5e-3,
    "update_ratio": 1e-3,
    "input_std": 1.0,
    "unit_observations": 64.0,
    "parameter_rms": 0.1,
    "weight_update_ratio": 1e-3,
    "trainable_fraction": 1.0,
    "learning_rate": 1e-3,
    "least_weight_rms": 0.1,
    "running_std": 1.0,
    "saturation": 0.5,
    "training_mode": 1.0,
    "hooks": 0.0,
}
NO_PARAMETERS = {name: np.nan for name in USUAL if name.startswith(("parameter", "update"))}

Changes = Callable[[int, str], Mapping[str, float]]


def row(step: int, layers: tuple[str, ...], changes: Changes, **fields: Any) -> StepRow:
    """Return a step whose layers have the usual numbers but for `changes`."""
    tables = [USUAL | dict(changes(step, layer)) for layer in layers]
    values = {name: np.array([table[name] for table in tables]) for name in STATISTICS}
    given: dict[str, Any] = {"loss": 2.0 / (1 + step), "gradient_norm": 1.0, "update_ratio": 1e-3}
    return StepRow(step=step, layers=layers, values=values, **given | fields)


def history(
    layers: tuple[str, ...],
    steps: range,
    changes: Changes = lambda step, layer: {},
    fields: Callable[[int], Mapping[str, Any]] = lambda step: {},
    **options: Any,
) -> History:
    """Return the history of these steps."""
    made = History(options.pop("keep", 1024), renderer=renderer, model_type="Net", **options)
    for step in steps:
        made.add(row(step, layers, changes, **fields(step)))
    return made


NET = ("", "fc1", "relu", "fc2")


def _net(step: int, layer: str) -> dict[str, float]:
    return NO_PARAMETERS if layer in ("", "relu") else {}


def healthy(**options: Any) -> History:
    """Twenty steps of a small network."""
    return history(NET, range(20), _net, **options)


def dying() -> History:
    """From step 12 on, the units of ``relu`` are dead, and ``fc1`` gets no gradient."""

    def changes(step: int, layer: str) -> dict[str, float]:
        if step >= 12 and layer == "relu":
            return _net(step, layer) | {"dead_fraction": 1.0, "zero_fraction": 1.0}
        if step >= 12 and layer == "fc1":
            return {"parameter_gradient_norm": 0.0, "gradient_norm": 0.0, "update_ratio": 0.0}
        return _net(step, layer)

    return history(NET, range(0, 40, 2), changes)


def exploding() -> History:
    """From step 15 on nothing is finite, which begins in ``fc2``."""

    def changes(step: int, layer: str) -> dict[str, float]:
        bad = {"activation_nonfinite": 9.0, "activation_mean": np.nan, "update_norm": np.nan}
        bad |= {"update_ratio": np.nan, "gradient_norm": 0.0, "gradient_nonfinite": 9.0}
        if layer in ("fc1", "fc2"):
            bad |= {"parameter_gradient_nonfinite": 9.0, "parameter_nonfinite": 3.0 * (step > 15)}
            bad |= {"parameter_gradient_norm": 0.0}
        return _net(step, layer) | bad if step >= 15 else _net(step, layer)

    def fields(step: int) -> dict[str, Any]:
        origin = Finding(
            "nonfinite_steps",
            "fc2",
            message="not finite first in the activations of 'fc2'",
        )
        return {"loss": np.nan, "origin": origin} if step >= 15 else {}

    return history(NET, range(20), changes, fields)


def one_step() -> History:
    """A single step."""
    return history(NET, range(1), _net)


def without_loss() -> History:
    """No loss was given."""
    return history(NET, range(5), _net, lambda step: {"loss": None})


def only_infinite_loss() -> History:
    """The loss is infinite from the first step on."""
    return history(NET, range(5), _net, lambda step: {"loss": np.inf})


def nothing_seen() -> History:
    """Layers of which there is nothing but names."""
    return history(NET, range(5), lambda step, layer: dict.fromkeys(USUAL, np.nan))


def no_layers() -> History:
    """A model that was not called."""
    return history((), range(3))


def all_zero() -> History:
    """Every number is zero."""
    return history(NET, range(5), lambda step, layer: dict.fromkeys(USUAL, 0.0))


def extreme() -> History:
    """Numbers at the limits of float64, infinities among them."""
    sizes = (5e-324, 1e308, np.inf, -np.inf, 1.0)
    half = {"dead_fraction": 0.5}
    return history(NET, range(5), lambda step, _: dict.fromkeys(USUAL, sizes[step]) | half)


def late() -> History:
    """A layer is seen from the tenth step on only, and steps are far from each other."""
    made = history(NET, range(0, 1000, 100), _net)
    for step in range(1000, 100_000, 10_000):
        made.add(row(step, (*NET, "late"), _net))
    return made


def hostile() -> History:
    """A name that holds markup, escapes and newlines."""
    return history((HOSTILE, "b"), range(5), lambda step, layer: {"dead_fraction": 1.0})


def large() -> History:
    """Six hundred layers and a thousand steps; one layer dies in one step alone."""
    names = tuple(f"encoder.layers.{i // 6}.part.{i % 6}" for i in range(600))
    made = history(names, range(1), keep=900)
    usual = row(1, names, lambda step, layer: {})
    for step in range(1, 899):
        made_row = usual
        if step == 500:
            made_row = row(
                step, names, lambda _, layer: {"dead_fraction": float(layer == names[77])}
            )
        made.add(StepRow(**{**vars(made_row), "step": step}))
    return made


CASES = (
    healthy, dying, exploding, one_step, without_loss, only_infinite_loss, nothing_seen, no_layers,
    all_zero, extreme, late, hostile, large,
)  # fmt: skip
