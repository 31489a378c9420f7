"""Weights that no initialiser should leave: all zero, all equal, or of a scale far off."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.check import Finding
from pytest_modelhealth.checks.facts import (
    IN_PROJECTION,
    LinearMap,
    called,
    flow_of,
    gain,
    learns,
    linear_maps,
    looks_trained,
    trainable,
)
from pytest_modelhealth.checks.paths import NORMALIZATIONS, normalizer, way_to_weights
from pytest_modelhealth.report import LayerRecord, Observation, Violation
from pytest_modelhealth.settings import Settings

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
    trained = looks_trained(observation)
    from statistics import median  # 5 ms, which a start of pytest need not pay

    usual = median([m.scale for _, m in maps]) if maps else 0.0
    small = {m.scale for r, m in maps if m.scale < settings.limit("min_weight_scale", r.name).value}
    is_shared = len(small) > max(1.0, _SHARED_BY * len(maps))
    for record, found in maps:
        if found.weights.abs_max == 0.0:
            yield from _zero(observation, record, found, settings)
        elif found.weights.std == 0.0:
            yield from _constant(record, found)
        elif wrong := (
            _large(observation, record, found, settings, trained)
            or _one_sided(record, found, settings, trained)
        ):
            yield wrong
        elif not is_shared:
            yield from _small(observation, record, found, settings, usual)
    yield from _constant_embeddings(observation)


def _zero(
    observation: Observation, record: LayerRecord, found: LinearMap, settings: Settings
) -> Iterator[Violation]:
    maps, path = linear_maps(record), way_to_weights(observation, record)
    is_recurrent = sum(map(_is_recurrent, maps)) > 1
    passes_nothing = is_recurrent and all(m.weights.abs_max == 0.0 for m in maps)
    if passes_nothing and found.tensor != maps[0].tensor:
        return  # its first weight stands for all
    if passes_nothing or found.tensor == IN_PROJECTION:
        cause = (
            "it is initialised to zero, so that nothing it is given passes: initialise at random; "
            "zero suits the last layer of a residual branch, gates and heads only"
        )
    elif (
        not path
        # offsets of a deformable convolution and first states may well start at zero
        or any(len(set(c.inputs)) > 1 for c in flow_of(observation).calls(path[-1].name))
        or _is_multiplied(observation, record)
    ):
        return
    else:
        cause = (
            f"it is initialised to zero, yet {path[-1].label!r} takes its output: that is the same "
            "for every sample, and no gradient passes back; zero suits the last layer of a "
            "residual branch, gates and heads only"
        )
    yield INITIAL_WEIGHTS.violation(
        record,
        f"all {found.weights.count} values of its {found.tensor} are zero",
        value=0.0,
        limit=settings.limit("min_weight_scale", record.name),
        tensor=found.tensor,
        cause=cause,
    )


def _is_multiplied(observation: Observation, record: LayerRecord) -> bool:
    """Whether its output is multiplied too: a gate, or a branch that one weighs.

    Where the flow was inferred no product is seen. There a layer beside it whose gradient is zero
    is one that it holds at zero so far.
    """
    flow, out = flow_of(observation), record.activations
    if flow.is_exact or out is None:
        return bool(flow.gate(record.name))
    beside = (observation.layers[name] for name in flow.siblings(record.name))
    silent = [r.activations for r in beside if r.gradients is not None and not r.gradients.abs_max]
    return learns(record) and any(s is not None and s.count == out.count for s in silent)


def _constant_embeddings(observation: Observation) -> Iterator[Violation]:
    """Yield tables that tell no tokens apart; those that are added to others are biases."""
    for record in called(observation):
        table = record.parameters.get("weight")
        if table is None or "num_embeddings" not in record.options or table.std != 0.0:
            continue
        path = way_to_weights(observation, record)
        if path and table.count >= _FEWEST_VALUES:
            message = f"all {table.count} values of its embedding table are {table.mean:.3g}"
            cause = f"every token looks alike to {path[-1].label!r}: initialise the table at random"
            yield INITIAL_WEIGHTS.fault(record, message, tensor="weight", cause=cause)


def _constant(record: LayerRecord, found: LinearMap) -> Iterator[Violation]:
    """Yield equal weights that make units one; those of a depthwise kernel differ in input."""
    shape, value = found.weights.shape, found.weights.mean
    is_depthwise = len(shape) > 2 and shape[1] == 1 and record.options.get("groups", 1) != 1
    if shape[0] == 1 or is_depthwise:
        return
    message = f"all {found.weights.count} values of its {found.tensor} are equal, {value:.3g}"
    cause = (
        f"a constant initialiser ({value:.3g}): all its units compute the same and get the same "
        "gradient, so they stay one unit; initialise at random"
    )
    yield INITIAL_WEIGHTS.fault(record, message, tensor=found.tensor, cause=cause)


def _large(
    observation: Observation,
    record: LayerRecord,
    found: LinearMap,
    settings: Settings,
    trained: bool,
) -> Violation | None:
    """Judge by the fan-out too, which some go by, and by what the weights do to the signal.

    Weights that are scaled down when they are used (equalised learning rates) magnify nothing.
    """
    limit = settings.limit("max_weight_scale", record.name)
    bound = limit.value * (_TRAINED_FACTOR if trained else 1.0)
    if found.scale <= bound or found.scale_by_fan_out <= bound / 2.0:
        return None
    grows, given, out = gain(record), record.inputs, record.activations
    # gates or a softmax come behind it inside its own layer, and saturate
    is_inner = _is_recurrent(found) or found.tensor == IN_PROJECTION
    if not is_inner:
        if given is None or out is None or not given.finite_count:
            return None
        if out.rms <= 0.4 * found.scale * given.rms:
            return None  # its bias alone, of a state of zeros, or scaled down when used
    norm = None if is_inner else normalizer(observation, record)
    is_end = not is_inner and not way_to_weights(observation, record)  # a head, a router
    room = _HEAD_FACTOR if is_end and not trained else 1.0
    if found.scale <= bound * (room if norm is None else _NORMALISED_FACTOR):
        return None
    message, advice = _measured(found)
    if norm is not None:
        cause = (
            f"initial weights too large: {norm.label!r} takes their scale away and divides their "
            f"gradient by it, so that a step of SGD changes them {found.scale**2:.2g} times less "
            f"than at a scale of 1; {advice}"
        )
    elif trained:
        cause = "weights grew or were rescaled: a learning rate too high, or a wrong checkpoint"
    else:
        effect = "the gates or the softmax behind them saturate"
        if not is_inner and grows is not None:
            effect = f"activations grow {grows:.3g} times here"
        cause = (
            f"initial weights too large, so that {effect}: divide by the root of the fan-in "
            f"({advice})"
        )
    return INITIAL_WEIGHTS.violation(
        record, message, value=found.scale, limit=limit, tensor=found.tensor, cause=cause
    )


def _measured(found: LinearMap) -> tuple[str, str]:
    """Return the scale of weights in words, and which is usual."""
    return (
        f"its {found.tensor} has a scale of {found.scale:.3g}: standard deviation "
        f"{found.weights.std:.3g} at a fan-in of {found.fan_in}"
    ), f"use a standard deviation near {1.0 / math.sqrt(found.fan_in):.2g}"


def _one_sided(
    record: LayerRecord, found: LinearMap, settings: Settings, trained: bool
) -> Violation | None:
    """Judge recurrent weights of one sign by their mean: what their inputs share goes by it.

    Others show in what they return.
    """
    limit = settings.limit("max_weight_scale", record.name)
    mean, shared = found.weights.mean, abs(found.weights.mean) * found.fan_in
    bound = limit.value * (_TRAINED_FACTOR if trained else 1.0)
    if not _is_recurrent(found) or abs(mean) <= found.weights.std or shared <= bound:
        return None
    message = (
        f"its {found.tensor} is one-sided: mean {mean:.3g}, standard deviation "
        f"{found.weights.std:.3g}, at a fan-in of {found.fan_in}"
    )
    cause = (
        "initial weights that do not lie around zero (uniform_(0, 1), torch.rand): they magnify "
        f"what their inputs share {shared:.3g} times, and the gates saturate"
    )
    return INITIAL_WEIGHTS.violation(
        record, message, value=shared, limit=limit, tensor=found.tensor, cause=cause
    )


def _is_recurrent(found: LinearMap) -> bool:
    return found.tensor.startswith(("weight_ih", "weight_hh"))


def _small(
    observation: Observation,
    record: LayerRecord,
    found: LinearMap,
    settings: Settings,
    usual: float,
) -> Iterator[Violation]:
    """Judge against the other layers: small weights that many layers share are a choice."""
    limit = settings.limit("min_weight_scale", record.name)
    if found.scale >= limit.value or usual < 2.0 * limit.value:
        return
    path = way_to_weights(observation, record)
    if not path or any(layer.type_name in NORMALIZATIONS for layer in path):
        return
    given, returned, bias = record.inputs, record.activations, record.parameters.get("bias")
    shift = 0.0 if bias is None else 2.0 * bias.rms
    if given and returned and returned.rms - shift > _UNLIKE * found.scale * given.rms:
        return  # it multiplies by more than these weights, which it standardises first
    message, advice = _measured(found)
    message += f" (the median of the model's layers is {usual:.3g})"
    cause = f"initial weights too small: signal and gradient shrink here by that factor; {advice}"
    yield INITIAL_WEIGHTS.violation(
        record, message, value=found.scale, limit=limit, tensor=found.tensor, cause=cause
    )
