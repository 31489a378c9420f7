"""Gradient norms within bounds: the user's, or what depth and the weights themselves explain."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator
from functools import partial
from itertools import pairwise, takewhile

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.check import Finding
from pytest_modelhealth.checks.facts import (
    called,
    completed,
    enclosing,
    flow_of,
    is_scale,
    largest_at,
    linear_maps,
    looks_trained,
    trainable,
)
from pytest_modelhealth.checks.gradient_scale import (
    BOUNDED,
    STEEPEST,
    contracting_chains,
    gradient_norm,
    singular,
    unmoving,
)
from pytest_modelhealth.checks.paths import factors, is_normalization, nearest, way_to
from pytest_modelhealth.report import Flow, LayerRecord, Observation, Violation
from pytest_modelhealth.report.flow import AS_IT_IS
from pytest_modelhealth.settings import Settings, Severity
from pytest_modelhealth.settings.setting import is_inside, parent
from pytest_modelhealth.statistics import TensorStatistics

GRAD_NORM = CHECKS["grad_norm"]


_FEWEST_LAYERS = 4
_SMALLEST_WEIGHT_RMS = 0.01
_NEXT_TO_ZERO = 1e-6
_CLEARLY = 0.1
_ABOUT, _FAR = 4.0, 10.0
_FAR_TARGETS = 100.0
_LEAST_SINGLE_CHANGE = math.log(1e3)
_LARGE_AT_THE_OUTPUT = 100.0
"""A mean of errors around one sends less than one."""
_GREAT = 10.0
"""The gain of weights that magnify; He et al. (2015) start at 1.41."""
_WEIGHING = frozenset({"baddbmm", "bmm", "einsum", "matmul", "mm", "mul"})
_VALUES = 2
"""The place of the values among the operands of fused attention."""


def findings(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield layers whose gradient norm is out of bounds."""
    records = [  # with finite gradients; the others are `finite`'s
        record
        for record in called(observation)
        if record.parameter_gradients
        and not any(s.nonfinite_count for s in record.parameter_gradients.values())
    ]
    yield from _absolute(records, observation, settings)
    exploding = list(_exploding(records, observation, settings))
    near = partial(_arriving, records, observation)
    yield from singular(records, observation, settings, near, exploding)
    vanished = list(_vanishing(records, observation, settings))
    yield from vanished or unmoving(records, observation, settings)
    known = {name for violation in vanished for name in violation.layers}
    if not looks_trained(observation):
        yield from _shrinking_chains(records, observation, settings, known)


def _absolute(
    records: list[LayerRecord], observation: Observation, settings: Settings
) -> Iterator[Violation]:
    for record in records:
        norm = gradient_norm(record, observation)
        for name, word, sign, cause in (
            ("max_grad_norm", "over", 1.0, _exploding_cause),
            ("min_grad_norm", "under", -1.0, _small_cause),
        ):
            limit = settings.limit(name, record.name)
            if limit.value is not None and sign * norm > sign * limit.value:
                message = f"gradient norm {norm:.3g} is {word} {limit.value:g}"
                why = cause(record, observation)
                yield GRAD_NORM.violation(record, message, value=norm, limit=limit, cause=why)


def _vanishing_cause(records: list[LayerRecord], observation: Observation) -> str:
    """Say what may shrink a gradient, of which there is something among the layers."""
    ran = called(observation)
    scales = [m.scale for record in records for m in linear_maps(record)]
    found = {
        "saturated activations": any(record.activation in BOUNDED for record in ran),
        "weights too small": 2 * sum(scale < 1.0 for scale in scales) > len(scales),
        "no normalisation": not any(map(is_normalization, ran)),
    }
    named = ", ".join(cause for cause, is_there in found.items() if is_there)
    return f"the layers after it shrink what comes back: {named or 'no residual path'}"


def _sent(observation: Observation) -> float:
    """Return the root mean square of the gradient that the loss sends back to the output."""
    root = observation.layers.get("")
    return 0.0 if root is None or root.gradients is None else root.gradients.rms


def _small_cause(record: LayerRecord, observation: Observation) -> str:
    """Say why a norm is under the bound that the user set."""
    if record.gradients is not None and record.gradients.rms < _CLEARLY * _sent(observation):
        return _vanishing_cause([record], observation)
    return (
        "the loss sends a small gradient back to the output, or what this layer is given is small"
    )


def _exploding_cause(record: LayerRecord, observation: Observation) -> str:
    given, arrived, sent = record.inputs, record.gradients, _sent(observation)
    if given is not None and given.finite_count and given.rms > 100.0:
        return f"its inputs are large (rms {given.rms:.3g}): normalise them or the layer before"
    if arrived is not None and sent and _CLEARLY * arrived.rms <= sent:
        return (
            f"the loss sends a gradient of root mean square {sent:.3g} back to the output: it "
            "is multiplied by too much, summed instead of averaged, or its targets are far off"
        )
    return "the layers after it magnify what comes back: weights too large, or no normalisation"


def _exploding(
    records: list[LayerRecord], observation: Observation, settings: Settings
) -> Iterator[Violation]:
    """Compare each layer's gradient with its own weights.

    A gradient that explodes does so in most layers on its way. In a single one it is what a
    normalisation makes of weights that start near zero: tokens of a vision transformer, embeddings
    of RWKV.
    """
    limits = {record.name: settings.limit("exploding_ratio", record.name) for record in records}
    ratios = {
        record.name: ratio
        for record in sorted(records, key=completed)
        if (ratio := _relative_gradient(record)) > limits[record.name].value
    }
    near = _arriving(records, observation) if ratios else {}
    explained: set[str] = set()
    for first in ratios:
        if first in explained:
            continue
        way, flow = way_to(first, near)[::-1], flow_of(observation)
        on_way = {*way, *flow.feeding(first)}
        on_way.update(r.name for r in records if is_inside(r.name, first))
        explained.update(way)
        if 2 * len(on_way & ratios.keys()) < sum(r.name in on_way for r in records):
            continue
        on_way |= flow.feeding(*way) | flow.reach(first)
        others = [name for name in ratios if name in on_way]
        explained.update(others)
        worst = observation.layers[max(others, key=lambda name: ratios[name])]
        limit, size = limits[worst.name], f"{ratios[worst.name]:.3g}"
        last = observation.layers[way[-1] if way else first]
        grown = ratios[worst.name] / (_relative_gradient(last) or math.inf)
        message = f"its gradient is {size} times as large as its weights (root mean square)"
        culprit, (cause, is_of_the_loss) = worst, _what_the_loss_asks(observation)
        severity: Severity = "fail"
        if found := _dominant_gain([observation.layers[name] for name in way], grows=True):
            gain, before, culprit = found
            message = f"the gradient grows {gain:.3g} times on its way back through it"
            if max((m.scale for m in linear_maps(culprit)), default=0.0) < _GREAT:
                cause = (
                    "what is computed between it and the layer before magnifies: a factor, a "
                    "division by what is next to zero, or a root there"
                    f"{factors(observation, [before.name], culprit.name)}"
                )
            else:
                weights = _rms(list(culprit.parameters.values()))
                cause = (
                    f"its weights (root mean square {weights:.3g}) magnify what passes: "
                    "initialised or grown too large for its width, with no normalisation around it"
                )
        elif is_of_the_loss and grown <= limit.value:
            severity = "warn"
        elif is_of_the_loss or not cause:
            cause = _exploding_cause(worst, observation)
        yield GRAD_NORM.violation(
            culprit,
            message,
            value=ratios[worst.name],
            limit=limit,
            cause=cause,
            affected=[name for name in others if name != culprit.name],
            severity=severity,
            details=largest_at(worst, "gradients"),
        )


def _what_the_loss_asks(observation: Observation) -> tuple[str, bool]:
    """Return the cause where the loss makes gradients large, and whether it is its scale alone.

    It may ask for outputs far larger than the model gives, or send a gradient that is large before
    any layer.
    """
    for call in observation.loss_calls:
        given, asked = call.input, call.target
        if given is None or asked is None or call.classes or not asked.finite_count:
            continue
        if asked.rms > _FAR_TARGETS * max(given.rms, 1.0):
            return (
                f"the targets have a root mean square of {asked.rms:.3g}, the outputs "
                f"{given.rms:.3g}: standardise the targets"
            ), False
    root = observation.layers.get("")
    sent = None if root is None else root.gradients
    if sent is None or not sent.finite_count or sent.norm <= _LARGE_AT_THE_OUTPUT:
        return "", False
    return (
        f"the loss is of that scale, no layer: it sends a gradient of norm {sent.norm:.3g} back "
        "to the output, as losses in small units or times a scale do; Adam does not see it, SGD "
        "and a limit on gradients do"
    ), True


def _vanishing(
    records: list[LayerRecord], observation: Observation, settings: Settings
) -> Iterator[Violation]:
    """Compare each layer's gradient with the largest of the layers after it, on its way back.

    Only layers that no other feeds count: a gradient that vanished stays away from all of them. A
    branch of weak layers with strong ones before it is a gate (LayerScale, a fresh adapter). Where
    the loss reads a token that sees the others through such branches only, all layers lie behind a
    gate; then they count as they will once it is open.
    """
    flow = flow_of(observation)
    ratios = {r.name: ratio for r in records if (ratio := _relative_gradient(r)) > 0.0}

    def largest(layer: str, came: float | None) -> float | None:
        return max(ratios.get(layer, 0.0), came or 0.0) or None

    after = flow.sweep(largest, max, back=True, by="gradient")
    parts = {r: ratios[r] / max(ratios[r], after.get(r, 0.0)) for r in ratios}
    limits = {name: settings.limit("vanishing_ratio", name) for name in parts}
    weak = {name for name, part in parts.items() if part < limits[name].value}
    if not weak or len(ratios) < _FEWEST_LAYERS:
        return
    gates = _gates(observation, {n for n in parts if parts[n] >= math.sqrt(limits[n].value)})

    def least(layer: str, came: float | None) -> float | None:
        return min(gates.get(layer, 1.0), 1.0 if came is None else came)

    opened = flow.sweep(least, min, back=True, by="gradient")
    weak = {name for name in weak if parts[name] < limits[name].value * opened.get(name, 1.0)}

    def strong(layer: str, came: bool | None) -> bool | None:
        return came or (layer in ratios and layer not in weak) or None

    fed = flow.sweep(strong, max, by="gradient")
    starved = [r for r in sorted(records, key=completed) if r.name in weak and r.name not in fed]
    by_scores = _steering(observation) if starved else ()
    steering = [r for r in starved if r.name in by_scores]
    near, explained = _arriving(records, observation), {r.name for r in steering}
    by_little = list(filter(_has_scale, steering))
    if by_little:
        faint = min(by_little, key=lambda record: parts[record.name])
        yield GRAD_NORM.violation(
            faint,
            f"its gradient is {parts[faint.name]:.2g} of that in the layers after it: it vanished",
            value=parts[faint.name],
            limit=limits[faint.name],
            cause="it reaches the loss by the scores of a softmax alone, which get little where "
            "the weights are nearly even, as in a fresh attention, or one-hot, the less behind a "
            "small scale: see that it grows in training",
            affected=[record.name for record in by_little if record is not faint],
            severity="warn",
        )
    for first in starved:
        if first.name in explained or not _has_scale(first):
            continue
        way = [observation.layers[name] for name in way_to(first.name, near)[::-1]]
        if any(r.name in fed for r in takewhile(lambda r: r.name in weak, way)):
            continue  # it is part of a branch that has strong layers before it
        behind = {r.name for r in starved} & flow.reach(first.name, by="gradient")
        others = {r.name for r in starved} & {*behind, *flow.feeding(*behind)} - {first.name}
        explained |= others
        culprit, message, cause = _where_it_vanished(way, parts[first.name], observation)
        yield GRAD_NORM.violation(
            culprit,
            message,
            value=parts[first.name],
            limit=limits[first.name],
            cause=cause,
            affected=[r.name for r in starved if r.name in {first.name, *others} - {culprit.name}],
        )


def _where_it_vanished(
    way: list[LayerRecord], part: float, observation: Observation
) -> tuple[LayerRecord, str, str]:
    """Return the culprit on the way of a gradient that vanished, what to say of it, and the cause.

    It is the layer that the gradient shrinks in, or the first of the way, behind all that do so.
    """
    if found := _dominant_gain(way, grows=False):
        gain, before, culprit = found
        weight = culprit.parameters.get("weight")
        if weight is not None and weight.rms * math.sqrt(math.prod(weight.shape[1:])) < 0.01:
            cause = f"its weights are too small (root mean square {weight.rms:.3g}) to pass it on"
        else:
            cause = (
                "the activation or arithmetic before it is flat for its inputs (saturated or "
                "clamped), or it multiplies by a factor near zero"
                f"{factors(observation, [before.name], culprit.name)}"
            )
        message = f"the gradient shrinks to {gain:.2g} of itself on its way back through it"
        return culprit, message, cause
    message = f"its gradient is {part:.2g} of that in the layers after it: it vanished"
    cause, gains = _vanishing_cause(way, observation), _gains(way)
    if gains:
        mean = math.exp(-math.fsum(math.log(gain) for gain, _, _ in gains) / len(gains))
        cause = f"it shrinks {mean:.3g} times a layer over {len(gains)} layers: {cause}"
    return way[0], message, cause


def _steering(observation: Observation) -> Collection[str]:
    """Return what has no way to the loss but by the scores of a softmax that weighs values."""
    flow, layers = flow_of(observation), observation.layers
    scores = []
    for number, vertex in enumerate(flow.graph.vertices):
        record = layers.get(vertex.name) if vertex.kind == "call" else None
        if record is None:
            continue
        is_fused = "keys" in record.options
        if is_fused or (record.activation == "softmax" and _weighs(number, flow)):
            places = range(len(vertex.operands))
            scores += [(number, p) for p in places if not (is_fused and p == _VALUES)]
    return flow.only_through(scores) if scores else ()


def _weighs(softmax: int, flow: Flow) -> bool:
    """Whether what a softmax gives is multiplied with values."""
    weights = {softmax}
    for number, vertex in enumerate(flow.graph.vertices[softmax:], softmax):
        if weights.isdisjoint(vertex.operands):
            continue
        if vertex.function in _WEIGHING:
            return True
        if vertex.function in AS_IT_IS | {"native_dropout"} or "drop" in vertex.name:
            weights.add(number)
    return False


def _shrinking_chains(
    records: list[LayerRecord],
    observation: Observation,
    settings: Settings,
    known: set[str],
) -> Iterator[Violation]:
    """Yield chains of bounded activations whose first layer has next to no gradient.

    Sigmoids shrink what comes back whatever the weights. Others do as far as they are saturated or
    the weights are small, and a start like that may be meant.
    """
    ratios = {record.name: _relative_gradient(record) for record in records}
    for chain in contracting_chains(observation):
        first = chain.layers[0]
        if not known.isdisjoint(record.name for record in chain.layers):
            continue
        limit = settings.limit("vanishing_chain_ratio", first.name)
        reached = flow_of(observation).reach(first.name, by="gradient")
        largest = max(ratio for name, ratio in ratios.items() if name in {first.name, *reached})
        part = ratios.get(first.name, 0.0) / largest if largest else 0.0
        if not 0.0 < part < limit.value:
            continue
        count, kinds = len(chain.layers) - 1, " and ".join(chain.activations)
        slope = max((STEEPEST.get(kind, 1.0) for kind in chain.activations), default=1.0)
        why = f", whose slope is {slope:.3g} at most" if slope < 1.0 else ""
        yield GRAD_NORM.violation(
            first,
            f"its gradient is {part:.2g} of that in the layers after it: it vanishes along "
            f"{count} activations in a row",
            value=part,
            limit=limit,
            cause=f"it shrinks {chain.factor:.3g} times a layer from {chain.layers[-1].label!r} "
            f"back to {first.label!r}, through {kinds}{why}: use ReLU or GELU, normalise between "
            "layers, or add the input of each block to its output",
            affected=[record.name for record in chain.layers[1:]],
            severity="fail" if slope < 1.0 else "warn",
        )


def _gates(observation: Observation, healthy: set[str]) -> dict[str, float]:
    """Return what part each gate that starts nearly closed lets through.

    The gradient before a gate is small by its start alone, and grows with its first steps: its own
    is `healthy`.
    """
    layers, ran, held = observation.layers, called(observation), defaultdict(list)
    for record in ran:
        for name in enclosing(record.name):
            held[parent(name)].append(record)
    weighted = {r.name: 1.0 for r in ran if linear_maps(r)}
    before_weights = nearest(observation, weighted, back=True)
    given = {r.name: r.inputs.rms for r in ran if r.inputs and r.name not in held}
    entering = nearest(observation, given, back=True)
    gates = {}
    for record in ran:
        out, inner = record.activations, held.get(record.name, [])
        if record.gradients is None or record.name not in healthy or out is None:
            continue
        joined = out.rms if inner else entering.get(record.name, (0.0, ""))[0]
        if record.name in weighted:  # a head that starts near zero, or the end of a branch
            part = max(found.scale_by_fan_out for found in linear_maps(record))
            is_open = record.name in before_weights and joined <= _FAR * out.rms
            if 0.0 < part < _SMALLEST_WEIGHT_RMS and not is_open:
                gates[record.name] = part
            continue
        sources = flow_of(observation).producers(record.name, as_it_is=True)
        branches = inner or [layers[source] for source in sources if source in layers]
        for scale in trainable(record).values():
            is_small = is_scale(scale.shape) and 0.0 < scale.rms < _SMALLEST_WEIGHT_RMS
            if is_small and any(_closes(record, scale.rms, b, joined) for b in branches):
                gates[record.name] = scale.rms
    return gates


def _closes(record: LayerRecord, scale: float, branch: LayerRecord, joined: float) -> bool:
    """Whether a layer multiplies a branch by its own `scale`, and that is added to what goes past.

    Multiplication shows in the gradient, which is smaller by the scale before it; what goes past,
    in the sum, which is not.
    """
    if branch.gradients is None or record.gradients is None or branch.activations is None:
        return False
    expected = scale * record.gradients.rms
    is_scaled = expected / _ABOUT <= branch.gradients.rms <= expected * _ABOUT
    return is_scaled and joined > _FAR * scale * branch.activations.rms


def _arriving(records: list[LayerRecord], observation: Observation) -> dict[str, tuple[float, str]]:
    """Return from which of the layers next after each most of its gradient comes."""
    arrived = {r.name: r.gradients.rms for r in records if r.gradients and r.gradients.rms > 0.0}
    return nearest(observation, arrived, back=True, by="gradient")


def _gains(way: list[LayerRecord]) -> list[tuple[float, LayerRecord, LayerRecord]]:
    """Return by how much the gradient grows on its way back, with the layers before and after.

    It is the gradient at the output of the layer before relative to that at the layer's own, so
    that the activation between the two counts with the later one.
    """
    return [
        (before.gradients.rms / record.gradients.rms, before, record)
        for before, record in pairwise(way)
        if before.gradients and record.gradients and before.gradients.rms and record.gradients.rms
    ]


def _dominant_gain(
    way: list[LayerRecord], *, grows: bool
) -> tuple[float, LayerRecord, LayerRecord] | None:
    """Return the gain that makes most of the change all by itself, with its layers, if one does."""
    gains = _gains(way)
    if not gains:
        return None
    sign = 1.0 if grows else -1.0
    total = sign * math.fsum(math.log(gain) for gain, _, _ in gains)
    found = max(gains, key=lambda gain: sign * gain[0])
    change = sign * math.log(found[0])
    return found if change >= _LEAST_SINGLE_CHANGE and 2 * change >= total else None


def _has_scale(record: LayerRecord) -> bool:
    """Whether weights of a layer are more than a start next to zero, and no scales of others."""
    weights = trainable(record).values()
    return any(s.rms > _NEXT_TO_ZERO and not is_scale(s.shape) for s in weights)


def _relative_gradient(record: LayerRecord) -> float:
    """Return the layer's gradient relative to its weights, both as root mean squares.

    Weights near zero (a zero-initialised output, a fresh adapter) have no scale of their own and
    count as 0.01.
    """
    names = [name for name in trainable(record) if name in record.parameter_gradients]
    gradients = _rms([record.parameter_gradients[name] for name in names])
    weights = _rms([record.parameters[name] for name in names])
    return gradients / max(weights, _SMALLEST_WEIGHT_RMS)


def _rms(statistics: list[TensorStatistics]) -> float:
    count = sum(s.finite_count for s in statistics)
    return math.sqrt(math.fsum(s.norm**2 for s in statistics) / count) if count else 0.0
