"""Activation functions held where they are flat: sigmoids at their ends, softmax at one-hot."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.check import Finding
from pytest_modelhealth.checks.facts import called, flow_of, gain, linear_maps, trainable
from pytest_modelhealth.checks.paths import held_by, maker
from pytest_modelhealth.report import LayerRecord, Observation
from pytest_modelhealth.settings import Limit, Settings
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


def findings(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield the activations that are saturated, in execution order."""
    for record in called(observation):
        finding = None
        if record.activation in _FLAT_FROM:
            finding = _bounded(record, observation, settings)
        elif record.activation in ("softmax", "softmin"):
            finding = _softmax(record, observation, settings)
        elif record.type_name == _ATTENTION:
            finding = _fused_attention(record, settings)
        if finding is not None:
            flow, layers = flow_of(observation), observation.layers
            reached = flow.reach(record.name).intersection(flow.layers, layers)
            if any(trainable(layers[name]) for name in reached):
                yield finding


def _bounded(record: LayerRecord, observation: Observation, settings: Settings) -> Finding | None:
    given = record.inputs
    if given is None or not given.finite_count:
        return None
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
    limit = settings.exceeded("max_saturated_fraction", record.name, fraction)
    if limit is None:
        return None
    units = record.activations.units if record.activations is not None else None
    seen = (0 if units is None else units.observations, "samples")
    what = f"{fraction:.0%} of its inputs lie where {record.activation} is flat"
    cause = (
        f"its inputs lie in [{given.min:.3g}, {given.max:.3g}], rms {given.rms:.3g}: "
        f"{_why_large(given, maker(observation, record))}"
    )
    return _finding(record, what, fraction, limit, seen, cause, settings)


def _softmax(record: LayerRecord, observation: Observation, settings: Settings) -> Finding | None:
    given, out, dim = record.inputs, record.activations, record.options.get("dim")
    if given is None or out is None or out.nonfinite_count:
        return None
    if not isinstance(dim, int) or not -len(out.shape) <= dim < len(out.shape):
        return None
    rows = out.count // out.shape[dim] if out.shape[dim] else 0
    if not rows:
        return None
    # the scores that no mask put out of the way, by powers of two
    scores = [
        (exponent, int(positive) + int(negative) * (exponent < _MASK_EXPONENT))
        for exponent, (negative, positive) in enumerate(
            given.exponents.counts, given.exponents.lowest
        )
    ]
    total = sum(count for _, count in scores) + given.zero_count
    # the mean square of numbers spread evenly over [1, 2) is 7/3
    squares = math.fsum(count * math.ldexp(7 / 3, 2 * exponent) for exponent, count in scores)
    one_hot, size = out.norm**2 / rows, math.sqrt(squares / total) if total else 0.0
    limit = settings.exceeded("max_one_hot", record.name, one_hot)
    if limit is None or total / rows < _FEWEST_CHOICES or size < _FINAL_SCORE:
        return None
    why = "queries and keys are too large, or a scale (1/sqrt(d)) is missing or turned round"
    if before := maker(observation, record):
        why = _why_large(given, before)
    what = f"its rows are one-hot: their mean sum of squares is {one_hot:.3g}"
    cause = f"its scores are about {size:.3g}: {why}"
    return _finding(record, what, one_hot, limit, (rows, "rows"), cause, settings)


def _finding(
    record: LayerRecord,
    what: str,
    value: float,
    limit: Limit,
    seen: tuple[int, str],
    cause: str,
    settings: Settings,
) -> Finding:
    """Return that a layer is saturated, or that too few samples or rows were seen to tell."""
    needed = settings.limit("min_samples", record.name)
    count, unit = seen
    if count < needed.value:
        reason = (
            f"{what}, but {count} {unit} say little; give at least {needed.value} (min_samples, "
            f"{needed.origin})"
        )
        return SATURATION.inconclusive(record, reason)
    return SATURATION.violation(record, f"saturated: {what}", value=value, limit=limit, cause=cause)


def _fused_attention(record: LayerRecord, settings: Settings) -> Finding | None:
    """Judge by queries and keys: the weights themselves never leave the fused kernel.

    Large scores alone prove nothing, since what all keys share drops out of a softmax. Where each
    output is one of the values, it is also as large as they are.
    """
    score, out = record.options.get("typical_score"), record.activations
    values, keys = record.options.get("value_std"), record.options.get("keys")
    if not (isinstance(score, float) and isinstance(values, float) and isinstance(keys, int)):
        return None
    kept = out.std / values if out is not None and values else 0.0
    limit = settings.exceeded("max_one_hot", record.name, kept)
    if limit is None or keys < _FEWEST_CHOICES or score < 2.0 * _FINAL_SCORE:
        return None
    message = f"saturated: its scores are about {score:.3g}, so that each output is a single value"
    cause = "queries and keys are too large, or the scale 1/sqrt(d) is missing"
    return SATURATION.violation(record, message, value=min(kept, 1.0), limit=limit, cause=cause)


_MASK_EXPONENT = 13  # masks add -1e4 or less, or -inf


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
