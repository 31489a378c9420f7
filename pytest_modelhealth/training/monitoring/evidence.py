"""What rules ask of a layer beside the usual numbers: what came in, and how its weights learn."""

from __future__ import annotations

import math

from pytest_modelhealth.capture.observing.layer import Layer
from pytest_modelhealth.capture.passive.step import WatchedStep
from pytest_modelhealth.statistics import TensorStatistics

EVIDENCE = (
    "input_std",
    "unit_observations",
    "parameter_rms",
    "weight_update_ratio",
    "trainable_fraction",
    "learning_rate",
    "least_weight_rms",
    "running_std",
    "saturation",
    "training_mode",
    "hooks",
)
"""``unit_observations`` is how many values of each unit were seen, ``weight_update_ratio`` the
update ratio of the parameters with two dimensions or more, ``trainable_fraction`` how many of the
parameters require gradients, ``learning_rate`` the largest that an optimizer stepped with,
``least_weight_rms`` the size of the smallest parameter with two dimensions or more, ``running_std``
the root of the mean of running variances, ``saturation`` how near to its ends a bounded activation
is, from 0 to 1, ``training_mode`` 1 or 0 for dropout and batch norm, ``hooks`` how many hooks the
module had."""


def evidence_of(layer: Layer, seen: WatchedStep) -> tuple[float, ...]:
    """Return what `EVIDENCE` names, NaN where nothing was seen.

    Args:
        layer: the layer.
        seen: the watched step.
    """
    given = seen.statistics(layer, "inputs")
    made = seen.statistics(layer, "activations")
    units = None if made is None else made.units
    return (
        math.nan if given is None else given.std,
        math.nan if units is None else units.observations,
        *_weights(layer, seen),
        seen.rates.get(layer.name, math.nan),
        _least_weight(layer),
        _running_std(layer),
        _saturation(layer, made),
        float(seen.modes.get(layer.name, math.nan)),
        float(seen.hooks.get(layer.name, math.nan)),
    )


def _least_weight(layer: Layer) -> float:
    held = (entry.statistics for entry in layer.own.get("parameters", {}).values())
    return min((seen.rms for seen in held if len(seen.shape) > 1), default=math.nan)


def _running_std(layer: Layer) -> float:
    found = layer.own.get("buffers", {}).get("running_var")
    if found is None or not found.statistics.finite_count:
        return math.nan
    return math.sqrt(max(found.statistics.mean, 0.0))


def _saturation(layer: Layer, made: TensorStatistics | None) -> float:
    """Return how near to its ends a bounded activation is: 1 where all values are 0, 1 or -1."""
    if made is None or not made.finite_count or made.nonfinite_count:
        return math.nan
    square = made.rms**2
    if layer.activation == "tanh" or layer.options.get("nonlinearity") == "tanh":
        return min(square, 1.0)
    if layer.activation == "sigmoid":
        return min(max(1.0 - 4.0 * (made.mean - square), 0.0), 1.0)
    if layer.activation == "softmax" and made.mean > 0.0:
        return min(square / made.mean, 1.0)
    return math.nan


def _weights(layer: Layer, seen: WatchedStep) -> tuple[float, float, float]:
    own = layer.own.get("parameters")
    if not own:
        return math.nan, math.nan, math.nan
    size = change = before = 0.0
    count = frozen = 0
    for name, entry in own.items():
        held = entry.statistics
        norm = held.norm
        size += norm * norm
        count += held.finite_count
        frozen += name in layer.frozen
        update = seen.updates.get((layer.name, name))
        if update is not None and len(held.shape) > 1:
            change += update.norm**2
            before += norm * norm
    return (
        math.sqrt(size / count) if count else math.nan,
        math.sqrt(change / before) if before else math.nan,
        1.0 - frozen / len(own),
    )
