"""Normalisations and dropouts: running statistics, scales, modes, and what comes out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.check import ALWAYS
from pytest_modelhealth.checks.facts import (
    at,
    called,
    flow_of,
    has_initial_statistics,
    has_moved,
    seems_trained,
)
from pytest_modelhealth.checks.paths import way_to_weights
from pytest_modelhealth.operations import having
from pytest_modelhealth.report import Finding, LayerRecord, Observation
from pytest_modelhealth.settings import Limit, Settings
from pytest_modelhealth.settings.setting import is_inside, parent

NORMALIZATION = CHECKS["normalization"]

_FEWEST_VALUES = 64
FEWEST_SAMPLES = 32
"""Of so many a branch that is dropped by the sample is never dropped by chance."""
_ALL = 0.99
_FUSED = "scaled_dot_product_attention"
_FORGOTTEN = 0.05
"""What running statistics may hold of the values they started with."""
_MOMENTUM = 0.1
_FEW = 4
_MAX_EPS = 0.1
"""1e-3 is the largest that is usual."""
_NOTHING = 1e-3
"""Rounding leaves 2e-5 of values that are normalised by themselves."""


def findings(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield normalisations and dropouts that do not do their work."""

    @cache
    def trained() -> bool:
        return seems_trained(observation)

    for record in called(observation):
        for rule in (_modes, _dropped, _scale, _over_one_value):
            yield from rule(record, observation, settings)
        yield from _statistics(record, settings, trained)


def _modes(record: LayerRecord, observation: Observation, _: Settings) -> Iterator[Finding]:
    """Yield what trains in a model that is evaluated, and dropout by a function there.

    Monte Carlo dropout is so by design. Fused attention has no word for its mode: there the rate
    that is passed is for training alone.
    """
    root, options = observation.layers.get(""), record.options
    given, out, effect = record.inputs, record.activations, ""
    evaluated = root is not None and root.options.get("training") is False
    if "running_var" in record.buffers:
        effect = "each sample's output depends on the others, and its running statistics move"
    elif "Dropout" in record.type_name and given and out and out.zero_count > given.zero_count:
        effect = "the output is random"
    if evaluated and effect and options.get("training") is True:
        message = f"it is in training mode inside a model in evaluation mode: {effect}"
        cause = (
            "it was made, replaced or switched with .train() after model.eval(), or hidden from it "
            "outside the registered modules"
        )
        yield NORMALIZATION.fault(record, message, value=1.0, cause=cause, independent=True)
    is_fused = record.functional and record.type_name == _FUSED
    caller = observation.layers[parent(record.name)] if is_fused else record
    rate = _number(options.get("dropout_p")) if is_fused else _functional_rate(record)
    if rate and caller.options.get("training") is False:
        flow = flow_of(observation)
        line = flow.line(record.name) if is_fused and record.name in flow else ""
        yield NORMALIZATION.fault(
            record,
            f"`{_FUSED if is_fused else 'dropout'}` drops with p={rate:g}{at(line)} although its "
            "layer is in evaluation mode: the output is random",
            value=rate,
            cause="it is on unless told: pass a rate of 0.0 or training=False unless self.training"
            + ("" if is_fused else ", or use nn.Dropout; Monte Carlo dropout is meant so"),
            independent=True,
            severity="fail" if is_fused else "warn",
        )


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _functional_rate(record: LayerRecord) -> float:
    """Return the rate of the functional dropout that a layer's own code calls, if it is on."""
    is_on = record.options.get("dropout_training") is True
    return _number(record.options.get("dropout_p")) if is_on else 0.0


def _dropped(record: LayerRecord, observation: Observation, _: Settings) -> Iterator[Finding]:
    """Yield that a layer drops all that it is given, or its caller's.

    By chance a dropout zeroes all of few values; so only many tell, and a branch that is dropped by
    the sample is held against that many samples.
    """
    given, out, options = record.inputs, record.activations, record.options
    message = "its functional dropout drops everything: p is 1"
    if _functional_rate(record) < 1.0:
        if given is None or out is None or not given.abs_max or out.count < _FEWEST_VALUES:
            return
        is_dropout = "Dropout" in record.type_name or record.type_name == _FUSED
        is_many = observation.samples >= FEWEST_SAMPLES * observation.batches
        is_off = any(_number(options.get(name)) >= _ALL for name in ("p", "dropout_p"))
        if out.zero_count < out.count or not (
            is_off if is_dropout else is_many and draws(observation, record)
        ):
            return
        message = f"all {given.count} values that it is given are dropped: it returns zeros alone"
    cause = (
        "its rate is 1 where the share to drop is asked for, as where the share to keep was meant "
        "(1 - p), a percentage, or a schedule that ran past its end"
    )
    yield NORMALIZATION.fault(record, message, value=1.0, cause=cause, independent=True)


def draws(observation: Observation, record: LayerRecord) -> bool:
    """Whether a module without parameters or layers draws, in training, what it keeps."""
    flow = flow_of(observation)
    if record.parameters or record.functional or record.options.get("training") is not True:
        return False
    if record.name not in flow or any(is_inside(n, record.name) for n in observation.layers):
        return False
    vertices, inside = flow.graph.vertices, flow.inside(record.name)
    made = inside.union(*(vertices[number].operands for number in inside))
    return any(vertices[n].has("draw", "dropout") for n in made)


def _statistics(
    record: LayerRecord, settings: Settings, trained: Callable[[], bool]
) -> Iterator[Finding]:
    """Yield running statistics that no data makes, or that do not fit the batch.

    In evaluation mode the output is held against what scale and shift make of normalised values.
    """
    variance, out = record.buffers.get("running_var"), record.activations
    if variance is None or variance.nonfinite_count or not variance.count:
        return  # `finite` names it
    training = record.options.get("training")
    if variance.min < 0.0 or (variance.max == 0.0 and training is not True):
        message = f"its running variance is negative, {variance.min:.3g}"
        cause = "a wrong checkpoint, an average of models, or an in-place operation wrote it"
        if variance.min == 0.0:
            message = "its running variance is zero in every channel: it divides by epsilon alone"
            cause = "its inputs were constant in training, or the buffer was never filled"
        place = {"role": "buffers", "tensor": "running_var", "independent": True}
        yield NORMALIZATION.fault(record, message, value=variance.min, cause=cause, **place)
        return
    if training is not False or out is None or not out.finite_count:
        return
    expected = _expected_rms(record)
    limit, factor = (
        settings.limit("max_norm_mismatch", record.name),
        out.rms / expected if expected else 1.0,
    )
    is_initial = has_initial_statistics(record)
    message = (
        f"in evaluation mode its output has a root mean square of {out.rms:.3g}, {factor:.3g} "
        f"times what its scale and shift make of normalised values"
    )
    if 1.0 / limit.value <= factor <= limit.value:
        if not (is_initial and has_moved(record) and trained()):
            return
        limit = ALWAYS
        message = "its scale and shift were trained, and its running statistics are as they started"
    tracked, mean = record.buffers.get("num_batches_tracked"), record.buffers.get("running_mean")
    counted = 0.0 if tracked is None else tracked.max
    momentum = (
        _number(record.options.get("momentum")) if "momentum" in record.options else _MOMENTUM
    )
    if is_initial and not (counted or trained()):
        return  # as it was initialised
    if not is_initial and counted and (1.0 - momentum) ** counted >= _FORGOTTEN:
        reason = f"{message}, but they have seen {counted:.0f} batches only; train on, then inspect"
        yield NORMALIZATION.inconclusive(record, reason)
        return
    given, center = record.inputs, "" if mean is None else f"mean {mean.mean:.3g}, "
    came = f" (mean {given.mean:.3g}, std {given.std:.3g} came in)" if given else ""
    cause = (
        f"its running statistics ({center}variance {variance.mean:.3g}) are far from the "
        f"batch{came}: inputs scaled otherwise than in training, or stale or wrong buffers"
    )
    if is_initial:
        why = f"its momentum was zero for the {counted:.0f} batches that it counted"
        cause = (
            "its running statistics were never updated (mean 0, variance 1): "
            f"{why if counted else 'training ran in evaluation mode'}, or they were reset, or the "
            "checkpoint left the buffers out"
        )
    yield NORMALIZATION.violation(record, message, value=factor, limit=limit, cause=cause)


def _expected_rms(record: LayerRecord) -> float:
    state = {**record.buffers, **record.parameters}  # frozen ones are buffers
    scale, shift = state.get("weight"), state.get("bias")
    return math.hypot(1.0 if scale is None else scale.rms, 0.0 if shift is None else shift.rms)


def _scale(record: LayerRecord, observation: Observation, _: Settings) -> Iterator[Finding]:
    """Yield normalisations of torch that flatten what they are given, by epsilon or scale."""
    eps, out, scale = record.options.get("eps"), record.activations, record.parameters.get("weight")
    if record.type_name not in having("normalization") or out is None:
        return
    factor = out.rms / (_expected_rms(record) or 1.0)
    if _number(eps) > _MAX_EPS and out.finite_count and factor < 0.9:
        message = f"its eps of {eps:g} flattens its output to {factor:.2g} of what it should be"
        cause = "eps is added to the variance, to divide by no zero: 1e-5 is usual"
        limit = Limit(_MAX_EPS, "always")
        yield NORMALIZATION.violation(
            record, message, value=_number(eps), limit=limit, cause=cause, independent=True
        )
    # the last one of a residual branch may start at zero
    is_zero = scale is not None and scale.abs_max == 0.0 and out.units
    if scale is not None and is_zero and (path := way_to_weights(observation, record)):
        message = f"all {scale.count} values of its scale are zero: what it gives out is constant"
        cause = (
            f"its scale starts or ended at zero, yet {path[-1].label!r} takes its output; zero "
            "suits the last normalisation of a residual branch only"
        )
        place = {"role": "parameters", "tensor": "weight", "independent": True}
        yield NORMALIZATION.fault(record, message, cause=cause, **place)


def _over_one_value(record: LayerRecord, _: Observation, __: Settings) -> Iterator[Finding]:
    """Yield that each value is normalised by itself, so that nothing is left of its differences."""
    given, out, scale = record.inputs, record.activations, record.parameters.get("weight")
    if given is None or out is None or not given.count or out.nonfinite_count:
        return
    is_lost = record.type_name == "LayerNorm" and scale is not None and scale.count == 1
    is_lost = is_lost and given.std > 0.0 and out.std == 0.0
    is_pixel = len(given.shape) > 1 and math.prod(given.shape[2:]) == 1
    units = out.units if record.type_name == "GroupNorm" and is_pixel else None
    if units is not None and len(units.maximum) and units.observations >= _FEW:
        is_lost = float((units.maximum - units.minimum).max()) < _NOTHING
        is_lost = is_lost and given.std > _NOTHING * given.abs_max
    if is_lost:
        message = "it normalises over a single value: what it gives out is constant"
        cause = (
            "each value is its own mean: a normalized_shape of 1, or a group of one channel of one "
            "pixel; use fewer groups, or normalise before the map has shrunk to a pixel"
        )
        yield NORMALIZATION.fault(record, message, cause=cause, independent=True)
