"""Activation functions held where they are flat: sigmoids at their ends, softmax at one-hot."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.facts import called, flow_of, gain, linear_maps, trainable
from pytest_modelhealth.checks.paths import held_by, maker
from pytest_modelhealth.operations import having
from pytest_modelhealth.report import Finding, LayerRecord, Observation
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.statistics import TensorStatistics

SATURATION = CHECKS["saturation"]


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
    unit: str


def findings(observation: Observation, settings: Settings) -> Iterator[Finding]:
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
            reason = (
                f"{measure.what}, but {measure.observations} {measure.unit} say little; give at "
                f"least {needed.value} (min_samples, {needed.origin})"
            )
            yield SATURATION.inconclusive(record, reason)
            continue
        why = "queries and keys are too large, or a scale (1/sqrt(d)) is missing or turned round"
        before, given = maker(observation, record), record.inputs
        is_fused = record.type_name == _ATTENTION
        if given and not is_fused and (before or record.activation in _FLAT_FROM):
            why = _why_large(given, before)
        yield SATURATION.violation(
            record,
            f"saturated: {measure.what}",
            value=measure.value,
            limit=limit,
            cause=f"{measure.inputs}: {why}",
        )


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
    return _Measure("max_saturated_fraction", fraction, what, inputs, samples, "samples")


def _softmax(
    record: LayerRecord, given: TensorStatistics, out: TensorStatistics
) -> _Measure | None:
    """Judge by how one-hot rows are whose scores leave the lesser ones no gradient."""
    dim, shape = record.options.get("dim"), out.shape
    if not isinstance(dim, int) or not -len(shape) <= dim < len(shape) or not shape[dim]:
        return None
    # the scores that no mask put out of the way, by powers of two
    scores = [
        (exponent, int(positive) + int(negative) * (exponent < _MASK_EXPONENT))
        for exponent, (negative, positive) in enumerate(
            given.exponents.counts, given.exponents.lowest
        )
    ]
    total, rows = sum(count for _, count in scores) + given.zero_count, out.count // shape[dim]
    # the mean square of numbers spread evenly over [1, 2) is 7/3
    squares = math.fsum(count * math.ldexp(7 / 3, 2 * exponent) for exponent, count in scores)
    size = math.sqrt(squares / total) if total else 0.0
    if not rows or total / rows < _FEWEST_CHOICES or size < _FINAL_SCORE:
        return None
    one_hot = out.norm**2 / rows
    what = f"its rows are one-hot: their mean sum of squares is {one_hot:.3g}"
    return _Measure("max_one_hot", one_hot, what, f"its scores are about {size:.3g}", rows, "rows")


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
    return _Measure("max_one_hot", min(out.std / values, 1.0), what, scores, out.count, "values")


def _why_large(given: TensorStatistics, before: LayerRecord | None) -> str:
    """Say which part of the layer before makes its outputs so large."""
    held = held_by(before, given)
    if before is None or held:
        return held
    grows = gain(before)
    if not linear_maps(before) or (grows is not None and grows <= 1.0):
        return f"{before.label!r} gives out that much: a scale or a normalisation is missing"
    return (
        f"the weights of {before.label!r} magnify its inputs {grows or math.inf:.3g} times: "
        "initialised on too large a scale, or grown in training"
    )
