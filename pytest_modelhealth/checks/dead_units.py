"""Units behind an activation function that never become active."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.facts import (
    called,
    flow_of,
    is_closed,
    linear_maps,
)
from pytest_modelhealth.checks.paths import held_by, maker
from pytest_modelhealth.operations import having
from pytest_modelhealth.report import Finding, LayerRecord, Observation
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.settings.setting import dotted
from pytest_modelhealth.statistics import TensorStatistics

DEAD_UNITS = CHECKS["dead_units"]


_FLOORS = {"celu": -1.0, "elu": -1.0, "selu": -1.7580993408473766}
"""Where the exponential ones end instead of at zero, times their own ``alpha``."""

_LIMITS = ("max_dead_fraction", "max_held_fraction")
_NEGLIGIBLE = 2.0**-20
_NEARLY = 1.0 - 2.0**-10
_MANY_UNITS = 16
_FEW_SAMPLES = 8
"""Enough for a layer of many units none of which is active: one by chance would be."""


def findings(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield activations with too many dead units."""
    for record in called(observation):
        found = _dead(record) if _can_die(record) else ()
        for name, fraction in zip(_LIMITS, found, strict=False):
            limit, out = settings.exceeded(name, record.name, fraction), record.activations
            if limit is None or out is None or out.units is None:
                continue
            before, units = maker(observation, record), len(out.units.alive)
            # the only unit of a layer without weights is a margin that may be satisfied
            is_hinge = units == 1 and (before is None or not linear_maps(before))
            if is_hinge or _may_open(record, observation):
                break
            seen, needed = out.units.observations, settings.limit("min_samples", record.name)
            count = f"{round(fraction * units)} of {units} units"
            is_silent = fraction == 1.0 and units >= _MANY_UNITS
            if seen < (min(_FEW_SAMPLES, needed.value) if is_silent else needed.value):
                reason = (
                    f"{count} were inactive, but {seen} samples say nothing about dead units; give "
                    f"at least {needed.value} (min_samples, {needed.origin})"
                )
                yield DEAD_UNITS.inconclusive(record, reason)
            else:
                message = f"{count} are dead: inactive for all {seen} samples"
                cause = _cause(record, before)
                yield DEAD_UNITS.violation(
                    record, message, value=fraction, limit=limit, cause=cause
                )
            break


def _can_die(record: LayerRecord) -> bool:
    """Whether a layer is an activation with a flat side, and no projection onto the simplex.

    That leaves most choices out on purpose.
    """
    out = record.activations
    if out is None or record.activation is None:
        return False
    if record.activation == "prelu":
        return all(s.abs_max <= _NEGLIGIBLE for s in record.parameters.values())
    total = out.mean * out.shape[-1] if out.shape else 0.0
    is_simplex = record.activation == "relu" and math.isclose(total, 1.0, rel_tol=1e-4)
    return record.activation in having("dying") and not is_simplex


def _dead(record: LayerRecord) -> tuple[float, ...]:
    """Return which part of the units is dead, and which part is held down besides, if known.

    Units are measured against the largest of their layer. Where all are silent, smooth activations
    (SiLU at -50 is -1e-20) still have a largest one: then the inputs tell that it is nothing. A
    unit is held down if its input always stays further below zero than any unit of the layer ever
    comes above it. Where samples line up by chance, both sides are alike.
    """
    out, given = record.activations, record.inputs
    if out is None or out.units is None or out.dead_fraction is None:
        return ()
    fraction = out.dead_fraction
    if record.activation in _FLOORS or record.activation == "threshold":
        fraction = float(_silent_units(record, out).mean())
    elif given is not None and out.abs_max <= _NEGLIGIBLE * given.abs_max:
        fraction = 1.0
    if given is None or given.units is None or len(given.units.alive) != len(out.units.alive):
        return (fraction,)
    held = ~out.units.alive & (given.units.maximum < -max(out.max, 0.0))
    return fraction, float(held.mean())


def _may_open(record: LayerRecord, observation: Observation) -> bool:
    """Whether it is given nothing but zeros so far, and training opens it.

    A layer or a gate that starts at zero and learns gives them, or a gradient passes it at zero.
    """
    given, gradient = record.inputs, record.gradients
    if given is None or not given.finite_count or given.abs_max != 0.0:
        return False
    if record.activation in having("sloped") and gradient is not None and gradient.abs_max > 0.0:
        return True
    feeding = flow_of(observation).feeding(record.name)
    return any(
        is_closed(layer)
        for layer in called(observation)
        if not feeding.isdisjoint(
            (layer.name, *(dotted(layer.name, name) for name in layer.parameters))
        )
    )


def _silent_units(record: LayerRecord, out: TensorStatistics) -> Any:
    """Return which units ended where theirs do instead of at zero: booleans."""
    assert out.units is not None
    low, high = out.units.minimum, out.units.maximum
    if record.activation == "threshold":
        value = record.options.get("value", 0.0)
        return (low == value) & (high == value)
    alpha = record.options.get("alpha", 1.0)
    floor = _FLOORS[str(record.activation)] * (alpha if isinstance(alpha, float) else 1.0)
    return high <= floor * _NEARLY


def _cause(record: LayerRecord, before: LayerRecord | None) -> str:
    """Say what holds the inputs of an activation on its flat side."""
    given = record.inputs
    if given is not None and given.finite_count and given.abs_max == 0.0:
        return "all its inputs are zero: the signal died before it"
    source = "its inputs" if before is None else f"the outputs of {before.label!r}"
    if given is None or not given.finite_count:
        return f"{source} are on its flat side for every sample"
    parameters = {} if before is None else before.parameters
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if bias is not None and given.min < 0.0 and bias.min <= 0.5 * given.min:
        why = f"its bias (mean {bias.mean:.3g}) holds them on the flat side"
    elif weight is not None and weight.mean < -0.5 * weight.std:
        why = f"its weights are mostly negative (mean {weight.mean:.3g})"
    else:
        why = held_by(before, given) or "a learning rate too high, or a bias that was shifted"
    return f"{source} lie in [{given.min:.3g}, {given.max:.3g}], mean {given.mean:.3g}: {why}"
