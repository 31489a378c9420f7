"""Normalisations and dropouts: running statistics, scales, modes, and what comes out."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.check import ALWAYS, Finding
from pytest_modelhealth.checks.facts import (
    at,
    called,
    flow_of,
    has_initial_statistics,
    has_moved,
    was_trained,
)
from pytest_modelhealth.checks.paths import NORMALIZATIONS, way_to_weights
from pytest_modelhealth.report import LayerRecord, Observation, Violation
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.settings.setting import is_inside, parent

NORMALIZATION = CHECKS["normalization"]


_FEWEST_VALUES = 64
FEWEST_SAMPLES = 32
"""Of so many a branch that is dropped by the sample is never dropped by chance."""
_ALL = 0.99
_FUSED = "scaled_dot_product_attention"
DRAWS = frozenset({"bernoulli", "rand", "rand_like", "new_rand", "uniform"})
"""Operations by which a layer, or a forward, draws what it keeps."""


def drops_everything(observation: Observation, record: LayerRecord) -> Iterator[Violation]:
    """Yield that a layer drops all that it is given, or its caller's.

    By chance a dropout zeroes all of few values; so only many tell, and a branch that is dropped by
    the sample is held against that many samples.
    """
    rate, given, out = _functional_rate(record), record.inputs, record.activations
    if rate is not None and rate >= 1.0:
        message = "its functional dropout drops everything: p is 1"
    elif given is None or out is None or out.count < _FEWEST_VALUES:
        return
    elif (
        given.zero_count < given.count
        and out.zero_count == out.count
        and (_is_off_by_rate(observation, record))
    ):
        rate = 1.0
        message = f"all {given.count} values that it is given are dropped: it returns zeros alone"
    else:
        return
    cause = (
        "its rate is 1 where the share to drop is asked for, as where the share to keep was meant "
        "(1 - p), a percentage, or a schedule that ran past its end"
    )
    yield NORMALIZATION.fault(record, message, value=rate, cause=cause, independent=True)


def _is_off_by_rate(observation: Observation, record: LayerRecord) -> bool:
    """Whether it is a dropout at its highest rate, or draws by itself what it keeps."""
    rate = record.options.get("dropout_p" if record.activation or record.functional else "p")
    if "Dropout" in record.type_name or record.type_name == _FUSED:
        return isinstance(rate, int | float) and rate >= _ALL
    if observation.samples < FEWEST_SAMPLES * observation.batches:
        return False
    return draws(observation, record)


def draws(observation: Observation, record: LayerRecord) -> bool:
    """Whether a module without parameters or layers draws, in training, what it keeps."""
    flow = flow_of(observation)
    if record.parameters or record.functional or record.options.get("training") is not True:
        return False
    if record.name not in flow or any(is_inside(n, record.name) for n in observation.layers):
        return False
    vertices, inside = flow.graph.vertices, flow.inside(record.name)
    made = inside.union(*(vertices[number].operands for number in inside))
    return any(vertices[n].function.strip("_") in DRAWS | {"native_dropout"} for n in made)


def drops_in_evaluation(observation: Observation, record: LayerRecord) -> Iterator[Violation]:
    """Yield that a layer in evaluation mode drops values by a function.

    Monte Carlo dropout does so by design, and a call shows no difference. Fused attention has no
    word for it: there the rate that is passed is for training alone.
    """
    rate, caller, function, line = _functional_rate(record), record, "dropout", ""
    cause = (
        "it is on unless told: pass training=self.training, or use nn.Dropout; Monte Carlo "
        "dropout is meant so"
    )
    if is_fused := record.functional and record.type_name == _FUSED:
        given, flow = record.options.get("dropout_p"), flow_of(observation)
        rate = float(given) if isinstance(given, int | float) else 0.0
        caller, function = observation.layers[parent(record.name)], _FUSED
        line = flow.line(record.name) if record.name in flow else ""
        cause = "its dropout_p applies in either mode: pass 0.0 unless self.training"
    if rate and caller.options.get("training") is False:
        yield NORMALIZATION.fault(
            record,
            f"`{function}` drops with p={rate:g}{at(line)} although its layer is in evaluation "
            "mode: the output is random",
            value=rate,
            cause=cause,
            independent=True,
            severity="fail" if is_fused else "warn",
        )


def _functional_rate(record: LayerRecord) -> float | None:
    """Return the rate of the functional dropout that a layer's own code calls, if it is on."""
    rate = record.options.get("dropout_p")
    is_on = record.options.get("dropout_training") is True
    return float(rate) if is_on and isinstance(rate, int | float) else None


_FORGOTTEN = 0.05
"""What running statistics may hold of the values they started with."""
_MOMENTUM = 0.1
_FEW = 4
_NOTHING = 1e-3
"""Rounding leaves 2e-5 of values that are normalised by themselves."""


def findings(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield normalisations that do not do their work."""
    trained = was_trained(observation)
    root = observation.layers.get("")
    evaluated = root is not None and root.options.get("training") is False
    for record in called(observation):
        if evaluated:
            yield from _left_in_training(record)
        yield from drops_everything(observation, record)
        yield from drops_in_evaluation(observation, record)
        if "running_var" in record.buffers:
            wrong = list(_running_variance(record))
            yield from wrong or _mismatch(record, settings, trained=trained)
        if record.type_name in NORMALIZATIONS:
            yield from _of_torch(observation, record, settings)


def _left_in_training(record: LayerRecord) -> Iterator[Violation]:
    given, returned, options = record.inputs, record.activations, record.options
    if options.get("training") is not True:
        return
    if "running_var" in record.buffers:
        effect = "each sample's output depends on the others, and its running statistics move"
    elif "Dropout" not in record.type_name or not options.get("p") or not (given and returned):
        return
    elif returned.zero_count > given.zero_count:
        effect = "the output is random"
    else:
        return
    message = f"it is in training mode inside a model in evaluation mode: {effect}"
    cause = (
        "it was made, replaced or switched with .train() after model.eval(), or hidden from it "
        "outside the registered modules"
    )
    yield NORMALIZATION.fault(record, message, value=1.0, cause=cause, independent=True)


def _running_variance(record: LayerRecord) -> Iterator[Violation]:
    variance = record.buffers["running_var"]
    if variance.nonfinite_count or not variance.count:
        return  # `finite` names it
    if variance.min < 0.0:
        message = f"its running variance is negative, {variance.min:.3g}"
        cause = "a wrong checkpoint, an average of models, or an in-place operation wrote it"
    elif variance.max == 0.0 and record.options.get("training") is not True:
        message = "its running variance is zero in every channel: it divides by epsilon alone"
        cause = "its inputs were constant in training, or the buffer was never filled"
    else:
        return
    place = {"role": "buffers", "tensor": "running_var", "independent": True}
    yield NORMALIZATION.fault(record, message, value=variance.min, cause=cause, **place)


def _mismatch(record: LayerRecord, settings: Settings, *, trained: bool) -> Iterator[Finding]:
    """Compare the output in evaluation mode with what scale and shift make of normalised values."""
    out, expected = record.activations, _expected_rms(record)
    if record.options.get("training") is not False or out is None or not out.finite_count:
        return
    limit = settings.limit("max_norm_mismatch", record.name)
    factor = out.rms / expected if expected else 1.0
    is_within = 1.0 / limit.value <= factor <= limit.value
    message = (
        f"in evaluation mode its output has a root mean square of {out.rms:.3g}, {factor:.3g} "
        f"times what its scale and shift make of normalised values"
    )
    if is_within:
        if not (trained and has_initial_statistics(record) and has_moved(record)):
            return
        limit = ALWAYS
        message = "its scale and shift were trained, and its running statistics are as they started"
    tracked = record.buffers.get("num_batches_tracked")
    counted = 0.0 if tracked is None else tracked.max
    momentum = record.options.get("momentum")
    momentum = momentum if isinstance(momentum, float) else _MOMENTUM
    mean, variance = record.buffers.get("running_mean"), record.buffers["running_var"]
    if has_initial_statistics(record):
        if not (trained or counted):
            return  # as it was initialised
        why = "training ran in evaluation mode"
        if counted:
            why = f"its momentum was zero for the {counted:.0f} batches that it counted"
        cause = (
            f"its running statistics were never updated (mean 0, variance 1): {why}, or they were "
            "reset, or the checkpoint left the buffers out"
        )
    elif counted and (1.0 - momentum) ** counted >= _FORGOTTEN:
        reason = f"{message}, but they have seen {counted:.0f} batches only; train on, then inspect"
        yield NORMALIZATION.inconclusive(record, reason)
        return
    else:
        given = record.inputs
        came = f" (mean {given.mean:.3g}, std {given.std:.3g} came in)" if given else ""
        center = f"mean {mean.mean:.3g}, " if mean is not None else ""
        cause = (
            f"its running statistics ({center}variance {variance.mean:.3g}) are far from the "
            f"batch{came}: inputs scaled otherwise than in training, or stale or wrong buffers"
        )
    yield NORMALIZATION.violation(record, message, value=factor, limit=limit, cause=cause)


def _expected_rms(record: LayerRecord) -> float:
    state = {**record.buffers, **record.parameters}  # frozen ones are buffers
    scale, shift = state.get("weight"), state.get("bias")
    return math.hypot(1.0 if scale is None else scale.rms, 0.0 if shift is None else shift.rms)


def _of_torch(
    observation: Observation, record: LayerRecord, settings: Settings
) -> Iterator[Violation]:
    """Yield normalisations of torch that flatten what they are given."""
    eps, out = record.options.get("eps"), record.activations
    limit, scale = settings.limit("max_norm_eps", record.name), record.parameters.get("weight")
    if isinstance(eps, float) and eps > limit.value and out is not None and out.finite_count:
        factor = out.rms / (_expected_rms(record) or 1.0)
        if factor < 0.9:
            message = f"its eps of {eps:g} flattens its output to {factor:.2g} of what it should be"
            cause = "eps is added to the variance, to divide by no zero: 1e-5 is usual"
            yield NORMALIZATION.violation(
                record, message, value=eps, limit=limit, cause=cause, independent=True
            )
    # the last one of a residual branch may start at zero
    is_zero = scale is not None and scale.abs_max == 0.0 and out is not None and out.units
    if scale is not None and is_zero and (path := way_to_weights(observation, record)):
        message = f"all {scale.count} values of its scale are zero: what it gives out is constant"
        cause = (
            f"its scale starts or ended at zero, yet {path[-1].label!r} takes its output; zero "
            "suits the last normalisation of a residual branch only"
        )
        place = {"role": "parameters", "tensor": "weight", "independent": True}
        yield NORMALIZATION.fault(record, message, cause=cause, **place)
    if _is_over_one_value(record):
        message = "it normalises over a single value: what it gives out is constant"
        cause = (
            "each value is its own mean: a normalized_shape of 1, or a group of one channel of one "
            "pixel; use fewer groups, or normalise before the map has shrunk to a pixel"
        )
        yield NORMALIZATION.fault(record, message, cause=cause, independent=True)


def _is_over_one_value(record: LayerRecord) -> bool:
    """Whether each value is normalised by itself, so that nothing is left of its differences."""
    given, out = record.inputs, record.activations
    if given is None or out is None or not given.count:
        return False
    if record.type_name == "LayerNorm":
        scale = record.parameters.get("weight")
        return scale is not None and scale.count == 1 and given.std > 0.0 and out.std == 0.0
    is_pixel = len(given.shape) > 1 and math.prod(given.shape[2:]) == 1
    if record.type_name != "GroupNorm" or not is_pixel or out.units is None:
        return False
    if out.nonfinite_count or len(out.units.maximum) == 0 or out.units.observations < _FEW:
        return False
    differ = given.std > _NOTHING * given.abs_max
    return differ and float((out.units.maximum - out.units.minimum).max()) < _NOTHING
