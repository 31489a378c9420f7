"""Normalisations and dropouts: running statistics, scales, modes, and what comes out."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.check import ALWAYS
from pytest_modelhealth.checks.facts import (
    at,
    called,
    flow_of,
    has_initial_statistics,
    has_moved,
    learns,
    seems_trained,
)
from pytest_modelhealth.checks.loss_terms import Faults
from pytest_modelhealth.checks.paths import normalizer, way_to_weights
from pytest_modelhealth.operations import having
from pytest_modelhealth.report import Finding, LayerRecord, Observation
from pytest_modelhealth.settings import Settings, Severity
from pytest_modelhealth.settings.setting import parent

NORMALIZATION = CHECKS["normalization"]

_FUSED = "scaled_dot_product_attention"


def findings(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield normalisations and dropouts that do not do their work."""
    concerned, changing = having("normalization") | {_FUSED}, {"training_before", "dropout_p"}
    for record in called(observation):
        kind, is_told = record.type_name, not changing.isdisjoint(record.options)
        if not (is_told or record.buffers or "Dropout" in kind or kind in concerned):
            continue
        for rule in (_modes, _scale, _over_one_value):
            for what, cause, grade in rule(record, observation):
                told = {"cause": cause, "severity": grade}
                yield NORMALIZATION.fault(record, what, independent=True, **told)
        yield from _statistics(record, observation, settings)
    yield from _cancelled(observation)


def _cancelled(observation: Observation) -> Iterator[Finding]:
    """Tell of biases whose gradient cancels out, as a normalisation behind takes the mean away."""
    idle: dict[str, str] = {}
    for record in called(observation):
        own, passed = record.parameter_gradients.get("bias"), record.gradients
        if own and passed and passed.norm > 0.0 and own.abs_max < _CANCELLED * passed.norm:
            norm = normalizer(observation, record) if learns(record) else None
            idle |= {} if norm is None else {record.name: norm.label}
    if idle:
        first, *others = idle
        what = f"its bias learns nothing: {idle[first]!r} takes away what it adds"
        what += f" ({len(others)} more like it)" if others else ""
        told = {"cause": "`bias=False` does the same", "affected": others, "severity": "note"}
        yield NORMALIZATION.fault(first, what, role="parameter_gradients", tensor="bias", **told)


# ---- dropouts, and modes ------------------------------------------------------------------------


def _modes(record: LayerRecord, observation: Observation) -> Faults:
    """Yield what trains in a model that is evaluated, dropout by a function there or of rate 1.

    Monte Carlo dropout is so by design. Fused attention has no word for its mode: there the rate
    that is passed is for training alone.
    """
    root, options, effect = observation.layers.get(""), record.options, ""
    given, out = record.inputs, record.activations
    evaluated = root is not None and root.options.get("training") is False
    before, here = options.get("training_before"), options.get("training")
    holder = observation.layers.get(parent(record.name), record)
    is_outermost = record is holder or "training_before" not in holder.options
    if isinstance(before, bool) and before is not here and is_outermost:
        modes = [f"{'training' if mode else 'evaluation'} mode" for mode in (before, here)]
        what = f"it was called in {modes[0]}, and its forward left it in {modes[1]}"
        yield what, "a helper called .eval() or .train(), and did not put back what was", "warn"
    if "running_var" in record.buffers:
        effect = "each sample's output depends on the others, and its running statistics move"
    elif "Dropout" in record.type_name and given and out and out.zero_count > given.zero_count:
        effect = "the output is random"
    if evaluated and effect and options.get("training") is True:
        cause = "it was made, replaced or switched with .train() after model.eval(), or hidden from"
        what = f"it is in training mode inside a model in evaluation mode: {effect}"
        yield what, f"{cause} it outside the registered modules", "fail"
    is_fused = record.type_name == _FUSED
    caller = observation.layers[parent(record.name)] if is_fused else record
    rate = _number(options.get("dropout_p")) if is_fused else _functional_rate(record)
    if rate and caller.options.get("training") is False:
        line = flow_of(observation).line(record.name) if is_fused else ""
        what = f"`{_FUSED if is_fused else 'dropout'}` drops with p={rate:g}{at(line)} although its"
        cause = "it is on unless told: pass a rate of 0.0 or training=False unless self.training"
        cause += "" if is_fused else ", or use nn.Dropout; Monte Carlo dropout is meant so"
        grade: Severity = "fail" if is_fused else "warn"
        yield f"{what} layer is in evaluation mode: the output is random", cause, grade
    is_on = "Dropout" in record.type_name and options.get("training") is True
    if _functional_rate(record) >= 1.0 or (is_on and _number(options.get("p")) >= 1.0):
        cause = "its rate is 1: the share to keep was meant, or a schedule ran past its end"
        yield "its dropout drops all that it is given", cause, "fail"


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _functional_rate(record: LayerRecord) -> float:
    """Return the rate of the functional dropout that a layer's own code calls, if it is on."""
    is_on = record.options.get("dropout_training") is True
    return _number(record.options.get("dropout_p")) if is_on else 0.0


# ---- running statistics -------------------------------------------------------------------------

_FORGOTTEN = 0.05
"""What running statistics may hold of the values they started with."""
_MOMENTUM = 0.1


def _statistics(
    record: LayerRecord, observation: Observation, settings: Settings
) -> Iterator[Finding]:
    """Yield running statistics that no data makes, or that do not fit the batch.

    In evaluation mode the output is held against what scale and shift make of normalised values.
    """
    variance, out = record.buffers.get("running_var"), record.activations
    if variance is None or variance.nonfinite_count or not variance.count:
        return  # `finite` names it
    training = record.options.get("training")
    if variance.min < 0.0 or (variance.max == 0.0 and training is not True):
        what = f"negative, {variance.min:.3g}" if variance.min < 0.0 else "zero in every channel"
        message = f"its running variance is {what}"
        cause = "its inputs were constant, or a checkpoint or an in-place operation wrote it"
        place = {"role": "buffers", "tensor": "running_var", "independent": True}
        yield NORMALIZATION.fault(record, message, value=variance.min, cause=cause, **place)
        return
    if training is not False or out is None or not out.finite_count:
        return
    expected, limit = _expected_rms(record), settings.limit("max_norm_mismatch", record.name)
    factor = out.rms / expected if expected else 1.0
    is_initial, is_trained = has_initial_statistics(record), seems_trained(observation)
    tracked = record.buffers.get("num_batches_tracked")
    counted = 0.0 if tracked is None else tracked.max
    message = (
        f"in evaluation mode its output has a root mean square of {out.rms:.3g}, {factor:.3g} "
        f"times what its scale and shift make of normalised values"
    )
    is_fit = 1.0 / limit.value <= factor <= limit.value
    if is_initial and not (counted or is_trained):
        return  # as it was initialised
    if is_fit and not (is_initial and has_moved(record) and is_trained):
        return
    if is_fit:
        limit = ALWAYS
        message = "its scale and shift were trained, and its running statistics are as they started"
    momentum = _number(record.options.get("momentum", _MOMENTUM))
    if not is_initial and counted and (1.0 - momentum) ** counted >= _FORGOTTEN:
        reason = f"{message}, but they have seen {counted:.0f} batches only; train on, then inspect"
        yield NORMALIZATION.inconclusive(record, reason)
        return
    mean = record.buffers.get("running_mean")
    held = f"mean {0.0 if mean is None else mean.mean:.3g}, variance {variance.mean:.3g}"
    cause = f"its running statistics ({held}) are far from the batch"
    if record.inputs is not None:
        cause += f" (mean {record.inputs.mean:.3g}, std {record.inputs.std:.3g} came in)"
    cause += ": inputs scaled otherwise than in training, or stale or wrong buffers"
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


# ---- scales, and what is normalised over --------------------------------------------------------

_CANCELLED = 1e-5
"""What rounding leaves of gradients that cancel out, by all of them."""
_MAX_EPS = 0.01
"""1e-3 is the largest that is usual."""
_FLATTENED = 0.71
"""What is left of values whose variance is eps."""
_FEW = 4
_NOTHING = 1e-3
"""Rounding leaves 2e-5 of values that are normalised by themselves."""


def _scale(record: LayerRecord, observation: Observation) -> Faults:
    """Yield normalisations of torch that flatten what they are given, by epsilon or scale."""
    eps, out = _number(record.options.get("eps")), record.activations
    if record.type_name not in having("normalization") or out is None:
        return
    factor = out.rms / (_expected_rms(record) or 1.0)
    if eps > _MAX_EPS and factor < _FLATTENED:
        what = f"its eps of {eps:g} flattens its output to {factor:.2g} of what it should be"
        cause = "eps is added to the variance, to divide by no zero, and 1e-5 is usual: it is the "
        cause += "second argument, where a momentum or a number of channels may have been meant"
        yield what, cause, "fail"
    # the last one of a residual branch may start at zero
    scale = record.parameters.get("weight")
    if scale and scale.abs_max == 0.0 and (path := way_to_weights(observation, record)):
        what = f"all {scale.count} values of its scale are zero: what it gives out is constant"
        cause = f"its scale starts or ended at zero, yet {path[-1].label!r} takes its output; zero "
        yield what, f"{cause}suits the last normalisation of a residual branch only", "fail"


def _over_one_value(record: LayerRecord, _: Observation) -> Faults:
    """Yield that each value is normalised by itself, so that nothing is left of its differences."""
    given, out, scale = record.inputs, record.activations, record.parameters.get("weight")
    if given is None or out is None or not given.std > _NOTHING * given.abs_max:
        return
    is_single = record.type_name == "LayerNorm" and scale is not None and scale.count == 1
    is_lost = is_single and out.std == 0.0
    is_pixel = len(given.shape) > 1 and math.prod(given.shape[2:]) == 1
    units = out.units if record.type_name == "GroupNorm" and is_pixel else None
    if units is not None and units.observations >= _FEW:
        is_lost = float((units.maximum - units.minimum).max()) < _NOTHING
    if is_lost:
        cause = "each value is its own mean: a normalized_shape of 1, or a group of one channel of "
        cause += "one pixel; use fewer groups, or normalise before the map has shrunk to a pixel"
        yield "it normalises over a single value: what it gives out is constant", cause, "fail"
