"""Activation functions held where they are flat: units that are dead, sigmoids at their ends."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.facts import called, flow_of, gain, is_closed, linear_maps, trainable
from pytest_modelhealth.checks.paths import held_by, maker
from pytest_modelhealth.operations import having
from pytest_modelhealth.report import Finding, LayerRecord, Observation
from pytest_modelhealth.settings import Limit, Settings
from pytest_modelhealth.settings.setting import dotted
from pytest_modelhealth.statistics import TensorStatistics

DEAD_UNITS = CHECKS["dead_units"]
SATURATION = CHECKS["saturation"]

_LIMITS = ("max_dead_fraction", "max_held_fraction")
_NEGLIGIBLE = 2.0**-20
_MANY_UNITS = 16
_FEW_SAMPLES = 8
"""Enough for a layer of many units none of which is active: one by chance would be."""


def findings(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield activations with too many dead units."""
    for record in called(observation):
        if not _can_die(record):
            continue
        found = _dead(record, settings.limit(_LIMITS[1], record.name).value)
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
                what = f"{count} were inactive, but {seen} samples say nothing about dead units"
                yield DEAD_UNITS.inconclusive(record, f"{what}; {_more(needed)}")
            else:
                message = f"{count} are dead: inactive for all {seen} samples"
                told: dict[str, Any] = {"value": fraction, "limit": limit}
                yield DEAD_UNITS.violation(record, message, cause=_cause(record, before), **told)
            break


def _more(needed: Limit) -> str:
    return f"give at least {needed.value} (min_samples, {needed.origin})"


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


def _dead(record: LayerRecord, least: float | None) -> tuple[float, ...]:
    """Return which part of the units is dead, and which is held down, if that may be over `least`.

    Units are measured against the largest of their layer. Where all are silent, smooth activations
    (SiLU at -50 is -1e-20) still have a largest one: then the inputs tell that it is nothing. A
    unit is held down if its input always stays further below zero than any unit of the layer ever
    comes above it. Where samples line up by chance, both sides are alike.
    """
    out, given = record.activations, record.inputs
    if out is None or out.units is None or (dead := out.dead_fraction) is None:
        return ()
    fraction = dead
    if given is not None and out.abs_max <= _NEGLIGIBLE * given.abs_max:
        fraction = 1.0
    if least is None or dead <= least:  # what is held down is dead
        return (fraction,)
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
    closed = [layer for layer in called(observation) if is_closed(layer)]
    names = {dotted(layer.name, name) for layer in closed for name in layer.parameters}
    return not feeding.isdisjoint(names.union(layer.name for layer in closed))


def _cause(record: LayerRecord, before: LayerRecord | None) -> str:
    """Say what holds the inputs of an activation on its flat side."""
    given = record.inputs
    if given is not None and given.finite_count and given.abs_max == 0.0:
        return "all its inputs are zero: the signal died before it"
    source = "its inputs" if before is None else f"the outputs of {before.label!r}"
    if given is None or not given.finite_count:
        return f"{source} are on its flat side for every sample"
    weight = None if before is None else before.parameters.get("weight")
    why = held_by(before, given)
    if not why and weight is not None and weight.mean < -0.5 * weight.std:
        why = f"its weights are mostly negative (mean {weight.mean:.3g})"
    why = why or "a learning rate too high, or a bias that was shifted"
    return f"{source} lie in [{given.min:.3g}, {given.max:.3g}], mean {given.mean:.3g}: {why}"


# ---- saturation ---------------------------------------------------------------------------------

_FLAT_FROM = {
    "hardsigmoid": (4.0, 4.0),
    "hardtanh": (1.0, 1.0),
    "logsigmoid": (math.inf, 16.0),
    "relu6": (math.inf, 8.0),
    "sigmoid": (8.0, 8.0),
    "softsign": (64.0, 64.0),
    "tanh": (4.0, 4.0),
}
"""How far below and above zero the derivative of each is under 0.002, as powers of two.

Inputs are counted by sign and power of two, so that these bounds cost nothing; where the true bound
lies between two powers (3 for Hardsigmoid, 6 for ReLU6), the outer one counts a little less. What
ReLU6 and LogSigmoid do on their other side is no saturation.
"""

_ATTENTION = "scaled_dot_product_attention"
_FEWEST_CHOICES = 4.0
_FINAL_SCORE = 16.0
"""Scores this far apart leave the lesser ones no gradient that float32 resolves: exp(-16) is 1e-7.

A trained router is one-hot for scores of 4, and can still change its mind.
"""

_MASK_EXPONENT = 13  # masks add -1e4 or less, or -inf


class _Measure(NamedTuple):
    """How saturated a layer is: by which setting, what is said, and how much was seen."""

    setting: str
    value: float
    what: str
    inputs: str
    observations: int


def saturation(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield the activations that are saturated, in execution order."""
    flow, layers = flow_of(observation), observation.layers
    for record in called(observation):
        measure = _measured(record)
        if measure is None:
            continue
        limit = settings.exceeded(measure.setting, record.name, measure.value)
        reached = flow.reach(record.name) if limit is not None else ()
        if limit is None or not any(trainable(layers[n]) for n in reached if n in layers):
            continue  # what no trainable layer follows is the model's answer
        needed = settings.limit("min_samples", record.name)
        if measure.observations < needed.value:
            what = f"{measure.what}, but {measure.observations} samples say little"
            yield SATURATION.inconclusive(record, f"{what}; {_more(needed)}")
            continue
        why = "queries and keys are too large, or a scale (1/sqrt(d)) is missing or turned round"
        before, given = maker(observation, record), record.inputs
        if given and record.type_name != _ATTENTION and (before or record.activation in _FLAT_FROM):
            why = held_by(before, given)
            if before is not None and not why:
                grows = gain(before) or math.inf
                why = f"{before.label!r} gives out {grows:.3g} times what it takes: weights too"
                why += " large, or grown in training, or a scale or a normalisation is missing"
        what, cause = f"saturated: {measure.what}", f"{measure.inputs}: {why}"
        yield SATURATION.violation(record, what, value=measure.value, limit=limit, cause=cause)


def _measured(record: LayerRecord) -> _Measure | None:
    given, out = record.inputs, record.activations
    if record.type_name == _ATTENTION:
        return _fused_attention(record)
    if given is None or out is None or not given.finite_count:
        return None
    if record.activation in _FLAT_FROM:
        return _bounded(record, given, out)
    is_softmax = record.activation in having("distribution") and not out.nonfinite_count
    return _softmax(record, given, out) if is_softmax else None


def _bounded(record: LayerRecord, given: TensorStatistics, out: TensorStatistics) -> _Measure:
    below, above = _FLAT_FROM[str(record.activation)]
    if record.activation == "hardtanh":
        low = float(record.options.get("min_val") or -1.0)
        high = float(record.options.get("max_val") or 1.0)
        below, above = -low if low < 0 else math.inf, high if high > 0 else math.inf
    signed, lowest = given.exponents.counts, given.exponents.lowest
    flat = sum(  # bounds count from the next power of two on
        int(negative) * (math.ldexp(1.0, exponent) >= below)
        + int(positive) * (math.ldexp(1.0, exponent) >= above)
        for exponent, (negative, positive) in enumerate(signed, lowest)
    )
    fraction = flat / given.finite_count
    what = f"{fraction:.0%} of its inputs lie where {record.activation} is flat"
    inputs = f"its inputs lie in [{given.min:.3g}, {given.max:.3g}], rms {given.rms:.3g}"
    samples = 0 if out.units is None else out.units.observations
    return _Measure("max_saturated_fraction", fraction, what, inputs, samples)


def _softmax(
    record: LayerRecord, given: TensorStatistics, out: TensorStatistics
) -> _Measure | None:
    """Judge by how one-hot rows are whose scores leave the lesser ones no gradient."""
    dim, shape = record.options.get("dim"), out.shape
    if not isinstance(dim, int) or not -len(shape) <= dim < len(shape) or not shape[dim]:
        return None
    # the scores that no mask put out of the way, by powers of two
    signed = enumerate(given.exponents.counts, given.exponents.lowest)
    scores = [(n, int(above) + int(below) * (n < _MASK_EXPONENT)) for n, (below, above) in signed]
    total, rows = sum(count for _, count in scores) + given.zero_count, out.count // shape[dim]
    # the mean square of numbers spread evenly over [1, 2) is 7/3
    squares = math.fsum(count * math.ldexp(7 / 3, 2 * n) for n, count in scores)
    size = math.sqrt(squares / total) if total else 0.0
    if not rows or total / rows < _FEWEST_CHOICES or size < _FINAL_SCORE:
        return None
    one_hot = out.norm**2 / rows
    what = f"its rows are one-hot: their mean sum of squares is {one_hot:.3g}"
    return _Measure("max_one_hot", one_hot, what, f"its scores are about {size:.3g}", rows)


def _fused_attention(record: LayerRecord) -> _Measure | None:
    """Judge by queries and keys: the weights themselves never leave the fused kernel.

    Large scores alone prove nothing, since what all keys share drops out of a softmax. Where each
    output is one of the values, it is also as large as they are.
    """
    score, out = record.options.get("typical_score"), record.activations
    values, keys = record.options.get("value_std"), record.options.get("keys")
    if not (isinstance(score, float) and isinstance(values, float) and isinstance(keys, int)):
        return None
    if out is None or not values or keys < _FEWEST_CHOICES or score < 2.0 * _FINAL_SCORE:
        return None
    scores = f"its scores are about {score:.3g}"
    what = f"{scores}, so that each output is a single value"
    return _Measure("max_one_hot", min(out.std / values, 1.0), what, scores, out.count)
