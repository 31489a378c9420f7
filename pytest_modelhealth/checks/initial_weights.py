"""Weights that no initialiser should leave: all zero, all equal, or of a scale far off."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.facts import (
    IN_PROJECTION,
    LinearMap,
    called,
    flow_of,
    gain,
    linear_maps,
    seems_trained,
    trainable,
)
from pytest_modelhealth.checks.paths import feeds_weights, normalizer, way_to_weights
from pytest_modelhealth.operations import having
from pytest_modelhealth.report import Finding, LayerRecord, Observation
from pytest_modelhealth.settings import Limit, Settings

INITIAL_WEIGHTS = CHECKS["initial_weights"]


_FEWEST_VALUES = 8
_TRAINED_FACTOR = 5.0
_NORMALISED_FACTOR = 5.0
_HEAD_FACTOR = 2.5
_SHARED_BY = 0.1
_UNLIKE = 10.0


def findings(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield weights that are zero, constant, too large or too small."""
    maps = [
        (record, found)
        for record in called(observation)
        for found in linear_maps(record)
        if found.tensor in trainable(record) and found.weights.count >= _FEWEST_VALUES
    ]
    scales = sorted(m.scale for _, m in maps)
    usual = scales[len(scales) // 2] if scales else 0.0
    small = {m.scale for r, m in maps if settings.exceeded("min_weight_scale", r.name, m.scale)}
    is_shared = len(small) > max(1.0, _SHARED_BY * len(maps))
    for record, found in maps:
        if found.weights.abs_max == 0.0:
            yield from _zero(observation, record, found, settings)
        elif found.weights.std == 0.0:
            yield from _constant(observation, record, found)
        elif found.scale in small:
            if not is_shared:
                limit = settings.limit("min_weight_scale", record.name)
                yield from _small(observation, record, found, limit, usual)
        else:
            yield from _large(observation, record, found, settings)


def _zero(
    observation: Observation, record: LayerRecord, found: LinearMap, settings: Settings
) -> Iterator[Finding]:
    maps, path = linear_maps(record), way_to_weights(observation, record)
    is_recurrent = sum(map(_is_recurrent, maps)) > 1
    passes_nothing = is_recurrent and all(m.weights.abs_max == 0.0 for m in maps)
    if passes_nothing and found.tensor != maps[0].tensor:
        return  # its first weight stands for all
    where = "nothing it is given passes"
    if not passes_nothing and found.tensor != IN_PROJECTION:
        # offsets of a deformable convolution and first states may well start at zero
        calls = flow_of(observation).calls(path[-1].name) if path else ()
        is_beside = any(len(set(call.inputs)) > 1 for call in calls)
        if not path or is_beside or flow_of(observation).gate(record.name):
            return
        where = f"{path[-1].label!r} gets the same for every sample, and no gradient passes back"
    yield INITIAL_WEIGHTS.violation(
        record,
        f"all {found.weights.count} values of its {found.tensor} are zero",
        value=0.0,
        limit=settings.limit("min_weight_scale", record.name),
        tensor=found.tensor,
        cause=f"it is initialised to zero, so that {where}: initialise at random; zero suits the "
        "last layer of a residual branch, gates and heads only",
    )


def _constant(observation: Observation, record: LayerRecord, found: LinearMap) -> Iterator[Finding]:
    """Yield equal weights that make units one; those of a depthwise kernel differ in input.

    Units that no weights follow each have a target of their own, and part with the first step.
    """
    shape, value = found.weights.shape, found.weights.mean
    is_depthwise = len(shape) > 2 and shape[1] == 1 and record.options.get("groups", 1) != 1
    if shape[0] > 1 and not is_depthwise:
        yield INITIAL_WEIGHTS.fault(
            record,
            f"all {found.weights.count} values of its {found.tensor} are equal, {value:.3g}",
            tensor=found.tensor,
            cause="a constant initialiser: all its units compute the same and get the same "
            "gradient, so they stay one unit; initialise at random",
            severity="fail" if feeds_weights(observation, record) else "warn",
        )


def _large(
    observation: Observation, record: LayerRecord, found: LinearMap, settings: Settings
) -> Iterator[Finding]:
    """Judge by the fan-out too, which some go by, and by what the weights do to the signal.

    Weights that are scaled down when they are used (equalised learning rates) magnify nothing.
    """
    limit = settings.limit("max_weight_scale", record.name)
    is_one_sided = _is_recurrent(found) and abs(found.weights.mean) > found.weights.std
    # what all its inputs share goes by the mean
    shared = abs(found.weights.mean) * found.fan_in if is_one_sided else 0.0
    if max(found.scale, shared) <= limit.value:
        return
    norms = [r.parameters.get("weight") for r in called(observation)]
    is_moved = any(s is not None and len(s.shape) == 1 and s.std > 0.0 for s in norms)
    trained = is_moved or seems_trained(observation)
    bound = limit.value * (_TRAINED_FACTOR if trained else 1.0)
    if shared > bound:
        cause = f"they are one-sided and magnify what their inputs share {shared:.3g} times"
        yield _violation(record, found, limit, cause)
        return
    if found.scale <= bound or found.scale_by_fan_out <= bound / 2.0:
        return
    given, out = record.inputs, record.activations
    # gates or a softmax come behind it inside its own layer, and saturate
    is_inner = _is_recurrent(found) or found.tensor == IN_PROJECTION
    norm, effect = None, "the gates or the softmax behind them saturate"
    if not is_inner:
        if given is None or out is None or not given.finite_count:
            return
        if out.rms <= 0.4 * found.scale * given.rms:
            return  # its bias alone, of a state of zeros, or scaled down when used
        norm = normalizer(observation, record)
        effect = f"activations grow {gain(record) or found.scale:.3g} times"
    is_end = not is_inner and not way_to_weights(observation, record)  # a head, a router
    room = _HEAD_FACTOR if is_end and not trained else 1.0
    if found.scale <= bound * (room if norm is None else _NORMALISED_FACTOR):
        return
    if norm is not None:
        effect = (
            f"{norm.label!r} divides their gradient by it, and a step of SGD changes them "
            f"{found.scale**2:.2g} times less than at a scale of 1"
        )
    when = "initial weights too large"
    if trained:
        when = "weights grew or were rescaled (a learning rate too high, or a wrong checkpoint)"
    yield _violation(record, found, limit, f"{when}, so that {effect}")


def _is_recurrent(found: LinearMap) -> bool:
    return found.tensor.startswith(("weight_ih", "weight_hh"))


def _small(
    observation: Observation, record: LayerRecord, found: LinearMap, limit: Limit, usual: float
) -> Iterator[Finding]:
    """Judge against the other layers: small weights that many layers share are a choice."""
    path = way_to_weights(observation, record)
    is_normalised = any(layer.type_name in having("normalization") for layer in path)
    if usual < 2.0 * limit.value or not path or is_normalised:
        return
    given, returned, bias = record.inputs, record.activations, record.parameters.get("bias")
    shift = 0.0 if bias is None else 2.0 * bias.rms
    if given and returned and returned.rms - shift > _UNLIKE * found.scale * given.rms:
        return  # it multiplies by more than these weights, which it standardises first
    cause = (
        "initial weights too small: signal and gradient shrink here by that factor, where the "
        f"median of the model's layers is {usual:.3g}"
    )
    yield _violation(record, found, limit, cause)


def _violation(record: LayerRecord, found: LinearMap, limit: Limit, cause: str) -> Finding:
    """Return that weights are of a scale far off, and which is usual."""
    return INITIAL_WEIGHTS.violation(
        record,
        f"its {found.tensor} has a scale of {found.scale:.3g}: standard deviation "
        f"{found.weights.std:.3g} at a fan-in of {found.fan_in}",
        value=found.scale,
        limit=limit,
        tensor=found.tensor,
        cause=f"{cause}: divide by the root of the fan-in, for a standard deviation near "
        f"{1.0 / math.sqrt(found.fan_in):.2g} around zero",
    )
