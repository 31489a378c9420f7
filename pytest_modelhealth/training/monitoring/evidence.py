"""What rules ask of a layer beside the usual numbers: what came in, and how its weights learn."""

from __future__ import annotations

import math

from pytest_modelhealth.capture.observing.layer import Layer
from pytest_modelhealth.capture.passive.step import WatchedStep

EVIDENCE = (
    "input_std",
    "unit_observations",
    "parameter_rms",
    "weight_update_ratio",
    "trainable_fraction",
    "learning_rate",
)
"""``unit_observations`` is how many values of each unit were seen, ``weight_update_ratio`` the
update ratio of the parameters with two dimensions or more, ``trainable_fraction`` how many of the
parameters require gradients, ``learning_rate`` the largest that an optimizer stepped with."""


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
    )


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
