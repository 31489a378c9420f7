"""Scales that are far off: of initial weights, and of activations on their way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.facts import (
    IN_PROJECTION,
    LinearMap,
    called,
    flow_of,
    gain,
    largest_at,
    leaves,
    linear_maps,
    seems_trained,
    trainable,
)
from pytest_modelhealth.checks.paths import (
    as_given,
    factors,
    is_floating,
    nearest,
    normalizer,
    way_to,
    way_to_weights,
)
from pytest_modelhealth.report import Finding, LayerRecord, Observation
from pytest_modelhealth.settings import Limit, Settings
from pytest_modelhealth.settings.setting import dotted
from pytest_modelhealth.statistics import TensorStatistics

ACTIVATION_SCALE = CHECKS["activation_scale"]
INITIAL_WEIGHTS = CHECKS["initial_weights"]

_JUMP = 10.0
_RISEN = 3.0
_MASK = 1e8


def activation_scale(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield where growths begin, if other weights come after and what is next does not end them."""
    inner = {r.name: r for r in leaves(observation) if _is_judged(r.activations)}
    scales = {name: _rms(record.activations) for name, record in inner.items()}
    bases, explained = _bases(observation, inner), set[str]()
    exceeded = partial(settings.exceeded, "max_activation_growth")
    grown = {n: limit for n in inner if (limit := exceeded(n, scales[n] / bases[n])) is not None}
    if not grown:
        return
    before, after = nearest(observation, scales), nearest(observation, scales, back=True)
    weighted = {name: 1.0 for name, record in inner.items() if linear_maps(record)}
    before_weights = nearest(observation, weighted, back=True)
    for name, limit in grown.items():
        base, record = bases[name], inner[name]
        stays = name in after and after[name][0] * _JUMP > limit.value * base
        if not stays or name not in before_weights or name in explained:
            continue
        culprit, cause = _origin(observation, [inner[n] for n in way_to(name, before)], base)
        reached = flow_of(observation).reach(culprit.name)
        explained |= {name, *reached}
        yield ACTIVATION_SCALE.violation(
            culprit,
            f"activations grow to {scales[name] / base:.3g} times the scale of the inputs "
            f"(root mean square {scales[name]:.3g} at {record.label!r})",
            value=scales[name] / base,
            limit=limit,
            cause=cause,
            affected=[layer for layer in inner if layer in reached],
            seen_in=() if record is culprit else (name,),
            details=largest_at(record, "activations"),
        )


def _bases(observation: Observation, inner: dict[str, LayerRecord]) -> dict[str, float]:
    """Return what each layer's scale is compared with: the inputs it is made of, at least 1."""
    flow, root = flow_of(observation), observation.layers.get("")
    whole, given = None if root is None else root.inputs, dict[str, float]()
    for name in ("", *flow.inputs):
        tensor = whole if not name else as_given(observation, name) or whole
        if tensor is not None and is_floating(tensor) and _is_judged(tensor):
            given[name] = tensor.rms
    least = 0.0 if flow.is_exact else given.get("", 0.0)
    given.pop("", None)  # the model itself begins none
    came = flow.sweep(lambda layer, came: given.get(layer, came), max)
    return {name: max(came.get(name, least), 1.0) for name in inner}


def _is_judged(statistics: TensorStatistics | None) -> bool:
    """Leave out what `finite` judges, masks, and layers that show no numbers."""
    is_known = statistics is not None and statistics.count > 0 == statistics.nonfinite_count
    return is_known and statistics is not None and not statistics.min < -_MASK


def _rms(statistics: TensorStatistics | None) -> float:
    return 0.0 if statistics is None else statistics.rms


def _origin(
    observation: Observation, way: list[LayerRecord], base: float
) -> tuple[LayerRecord, str]:
    """Return the layer where the growth along a way begins, and its likely cause."""
    scales = [base, *(_rms(record.activations) for record in way)]
    for place, (before, after) in enumerate(pairwise(scales)):
        factor, record = after / max(before, base), way[place]
        own = gain(record)
        if factor <= _JUMP:
            continue
        if own is None or own >= _JUMP / 3.0:
            cause = f"it gives out {own or factor:.3g} times what it takes: weights too large, or"
            return record, f"{cause} it sums, or a factor is missing or misplaced in its forward"
        sources = [way[place - 1].name] if place else flow_of(observation).inputs
        cause = f"what comes in is {factor:.3g} times larger than what went out before it"
        return record, f"{cause}{factors(observation, sources, record.name)}"
    risen = len(way) - 1
    while risen > 0 and scales[risen] > _RISEN * base:
        risen -= 1
    weighted = [record for record in way[risen:] if linear_maps(record)]
    cause = "the gains of the layers from here on multiply: weights too large, or a residual stream"
    return (weighted or way[risen:])[0], f"{cause} that is added to without a normalisation"


# ---- weights that no initialiser should leave: all zero, all equal, too large -------------------

_FEWEST_VALUES = 8
_TRAINED_FACTOR = 5.0
_NORMALISED_FACTOR = 5.0
_HEAD_FACTOR = 2.5


def initial_weights(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield weights that are zero, constant or too large."""
    norms = [r.parameters.get("weight") for r in called(observation)]
    is_moved = any(s is not None and len(s.shape) == 1 and s.std > 0.0 for s in norms)
    is_trained = is_moved or seems_trained(observation)
    for record in called(observation):
        for found in linear_maps(record):
            if found.tensor not in trainable(record) or found.weights.count < _FEWEST_VALUES:
                continue
            if found.weights.abs_max == 0.0:
                yield from _zero(observation, record, found)
            elif found.weights.std == 0.0:
                yield from _constant(observation, record, found)
            else:
                limit = settings.limit("max_weight_scale", record.name)
                yield from _large(observation, record, found, limit, is_trained)


def _zero(observation: Observation, record: LayerRecord, found: LinearMap) -> Iterator[Finding]:
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
        if not path or is_beside or flow_of(observation).is_gated(record.name):
            return
        where = f"{path[-1].label!r} gets the same for every sample, and no gradient passes back"
    yield INITIAL_WEIGHTS.fault(
        record,
        f"all {found.weights.count} values of its {found.tensor} are zero",
        tensor=found.tensor,
        cause=f"it is initialised to zero, so that {where}: initialise at random; zero suits the "
        "last layer of a residual branch, gates and heads only",
    )


def _constant(observation: Observation, record: LayerRecord, found: LinearMap) -> Iterator[Finding]:
    """Yield equal weights that make units one; those of a depthwise kernel differ in input.

    Units that no weights follow each have a target of their own, and part with the first step.
    What is multiplied by others, number by number, is a scale, as of a noisy layer's noise.
    """
    shape, value, flow = found.weights.shape, found.weights.mean, flow_of(observation)
    is_depthwise = len(shape) > 2 and shape[1] == 1 and record.options.get("groups", 1) != 1
    own, ways = flow.values.get(dotted(record.name, found.tensor), ()), flow.ways()
    uses = [flow.graph.vertices[taker] for value in own for taker in ways[value]]
    is_scale = uses and all(v.has("product") and len({*v.operands}) > 1 for v in uses)
    if shape[0] > 1 and not is_depthwise and not is_scale:
        layers, reached = observation.layers, flow.reach(record.name)
        feeds_weights = any(linear_maps(layers[name]) for name in reached if name in layers)
        yield INITIAL_WEIGHTS.fault(
            record,
            f"all {found.weights.count} values of its {found.tensor} are equal, {value:.3g}",
            tensor=found.tensor,
            cause="a constant initialiser: all its units compute the same and get the same "
            "gradient, so they stay one unit; initialise at random",
            severity="fail" if feeds_weights else "warn",
        )


def _large(
    observation: Observation, record: LayerRecord, found: LinearMap, limit: Limit, trained: bool
) -> Iterator[Finding]:
    """Judge by the fan-out too, which some go by, and by what the weights do to the signal.

    Weights that are scaled down when they are used (equalised learning rates) magnify nothing.
    """
    scale, bound = found.scale, limit.value * (_TRAINED_FACTOR if trained else 1.0)
    is_one_sided = _is_recurrent(found) and abs(found.weights.mean) > found.weights.std
    # what all its inputs share goes by the mean
    shared = abs(found.weights.mean) * found.fan_in if is_one_sided else 0.0
    # gates or a softmax come behind it inside its own layer, and saturate
    is_inner = _is_recurrent(found) or found.tensor == IN_PROJECTION
    given, out = record.inputs, record.activations
    cause = "initial weights too large"
    if trained:
        cause = "weights grew or were rescaled (a learning rate too high, or a wrong checkpoint)"
    if shared > bound:
        cause = f"they are one-sided and magnify what their inputs share {shared:.3g} times"
    elif scale <= bound or found.scale_by_fan_out <= bound / 2.0:
        return
    elif is_inner:
        cause += ", so that the gates or the softmax behind them saturate"
    else:
        # by its bias alone, of a state of zeros, or scaled down when used
        if not given or not out or not given.finite_count or out.rms <= 0.4 * scale * given.rms:
            return
        norm = normalizer(observation, record)
        is_end = not trained and not way_to_weights(observation, record)  # a head, a router
        if scale <= bound * (_NORMALISED_FACTOR if norm else _HEAD_FACTOR if is_end else 1.0):
            return
        cause += f", so that activations grow {gain(record) or scale:.3g} times"
        if norm is not None:
            cause += f", and {norm.label!r} divides their gradient by that"
    yield INITIAL_WEIGHTS.violation(
        record,
        f"its {found.tensor} has a scale of {scale:.3g}: standard deviation "
        f"{found.weights.std:.3g} at a fan-in of {found.fan_in}",
        value=scale,
        limit=limit,
        tensor=found.tensor,
        cause=f"{cause}: divide by the root of the fan-in, for a standard deviation near "
        f"{1.0 / math.sqrt(found.fan_in):.2g} around zero",
    )


def _is_recurrent(found: LinearMap) -> bool:
    return found.tensor.startswith(("weight_ih", "weight_hh"))
