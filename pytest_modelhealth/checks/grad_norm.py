"""Gradient norms within bounds: the user's, or what depth and the weights themselves explain."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from pytest_modelhealth.checks.check import Check, Finding
from pytest_modelhealth.checks.evidence import (
    called,
    completed,
    is_inside,
    producer,
    same_values,
    trainable,
)
from pytest_modelhealth.checks.paths import is_normalization
from pytest_modelhealth.checks.weights import is_scale, linear_maps
from pytest_modelhealth.settings import Setting, Settings

if TYPE_CHECKING:
    from pytest_modelhealth.report import LayerRecord, Observation, Violation
    from pytest_modelhealth.statistics import TensorStatistics

_FEWEST_LAYERS = 4
_SMALLEST_WEIGHT_RMS = 0.01


class GradNorm(Check):
    """No layer's parameter gradient vanishes or explodes.

    The gradient norm of a layer is the L2 norm of the gradients of its own parameters, the root
    mean square over batches where there are several. What is large or small in itself depends on
    the loss, so there are no absolute bounds unless the user sets them. By default a layer is
    compared with the other layers and with its own weights.
    """

    name = "grad_norm"
    summary = "No layer's gradient norm vanishes or explodes."
    gravity = 40
    reads_scale = True
    role = "parameter_gradients"
    definition = (
        "The L2 norm of the gradients of a layer's own parameters lies within the bounds set, if "
        "any. Relative to its weights, no gradient of the first layers falls under vanishing_ratio "
        "of the largest after it, and not half of the layers rise over exploding_ratio."
    )
    source = (
        "AutoTrainer compares first and last layer (under 1e-3, over 70); the limits here are "
        "measured on healthy transformers, whose layers differ by more"
    )
    minimum_evidence = "one batch with a backward pass; four layers with gradients to vanish"
    settings = (
        Setting(
            "max_grad_norm",
            float,
            default=None,
            minimum=0.0,
            help="largest L2 norm of the gradients of one layer's parameters",
        ),
        Setting(
            "min_grad_norm",
            float,
            default=None,
            minimum=0.0,
            help="smallest L2 norm of the gradients of one layer's parameters",
        ),
        Setting(
            "vanishing_ratio",
            float,
            default=1e-7,
            minimum=0.0,
            maximum=1.0,
            help="smallest gradient of the first layers relative to their weights, as a part of "
            "the largest such ratio in a later layer (float32 resolves 1e-7: nothing is learnt)",
        ),
        Setting(
            "exploding_ratio",
            float,
            default=1e4,
            minimum=0.0,
            help="largest root mean square of a layer's gradients relative to that of its weights "
            "(at 1e4, one step at a learning rate of 1e-4 is as large as the weights)",
        ),
    )

    def run(self, observation: Observation, settings: Settings) -> Iterator[Finding]:
        """Yield layers whose gradient norm is out of bounds."""
        records = [record for record in called(observation) if _gradients(record)]
        yield from _absolute(records, observation, settings)
        yield from _exploding(records, observation, settings)
        yield from _vanishing(records, observation, settings)


def _gradients(record: LayerRecord) -> list[TensorStatistics]:
    """Return the finite gradients of the layer's own parameters; the others are `finite`'s."""
    gradients = list(record.parameter_gradients.values())
    return gradients if all(not s.nonfinite_count for s in gradients) else []


def _absolute(
    records: list[LayerRecord], observation: Observation, settings: Settings
) -> Iterator[Violation]:
    for record in records:
        largest = settings.limit("max_grad_norm", record.name)
        smallest = settings.limit("min_grad_norm", record.name)
        norm = math.sqrt(math.fsum(s.norm**2 for s in _gradients(record)) / observation.batches)
        if largest.value is not None and norm > largest.value:
            message = f"gradient norm {norm:.3g} is over {largest.value:g}"
            yield GradNorm.violation(
                record,
                message,
                value=norm,
                limit=largest,
                cause=_exploding_cause(record, observation),
            )
        if smallest.value is not None and norm < smallest.value:
            message = f"gradient norm {norm:.3g} is under {smallest.value:g}"
            yield GradNorm.violation(
                record, message, value=norm, limit=smallest, cause=_small_cause(record, observation)
            )


_FLAT = frozenset({"sigmoid", "hardsigmoid", "tanh", "hardtanh", "softsign", "logsigmoid"})


def _vanishing_cause(records: list[LayerRecord], observation: Observation) -> str:
    """Say what may shrink a gradient, of which there is something among the layers."""
    found = []
    if any(record.activation in _FLAT for record in called(observation)):
        found.append("saturated activations")
    scales = [m.scale for record in records for m in linear_maps(record)]
    if 2 * sum(scale < 1.0 for scale in scales) > len(scales):
        found.append("weights too small")
    if not any(map(is_normalization, called(observation))):
        found.append("no normalisation")
    return f"the layers after it shrink what comes back: {', '.join(found) or 'no residual path'}"


def _small_cause(record: LayerRecord, observation: Observation) -> str:
    """Say why a norm is under the bound that the user set."""
    root = observation.layers.get("")
    if record.gradients is None or root is None or root.gradients is None:
        return "the gradient that reaches it is small"
    if record.gradients.rms < _CLEARLY * root.gradients.rms:
        return _vanishing_cause([record], observation)
    return (
        "the loss sends a small gradient back to the output, or what this layer is given is small"
    )


_CLEARLY = 0.1


def _exploding_cause(record: LayerRecord, observation: Observation) -> str:
    given, root = record.inputs, observation.layers.get("")
    if given is not None and given.finite_count and given.rms > 100.0:
        return (
            f"its inputs are large (rms {given.rms:.3g}): normalise them or scale the layer before"
        )
    arrived, sent = record.gradients, None if root is None else root.gradients
    if arrived is not None and sent is not None and _CLEARLY * arrived.rms <= sent.rms:
        return (
            f"the loss sends a gradient of root mean square {sent.rms:.3g} back to the output: it "
            "is multiplied by too much, summed instead of averaged, or its targets are far off"
        )
    return "the layers after it magnify what comes back: weights too large, or no normalisation"


def _exploding(
    records: list[LayerRecord], observation: Observation, settings: Settings
) -> Iterator[Violation]:
    """Compare each layer's gradient with its own weights.

    A gradient that explodes does so in most layers. In a single one it is what a normalisation
    makes of weights that start near zero: tokens of a vision transformer, embeddings of RWKV.
    """
    worst = [
        (ratio, record)
        for record in records
        if (ratio := _relative_gradient(record))
        > settings.limit("exploding_ratio", record.name).value
    ]
    if 2 * len(worst) < max(len(records), 1):
        return
    ratio, worst_record = max(worst, key=lambda pair: pair[0])
    message = f"its gradient is {ratio:.3g} times as large as its weights (root mean square)"
    record, cause = worst_record, _exploding_cause(worst_record, observation)
    targets = _large_targets(observation)
    found = _dominant_gain(records, grows=True)
    if found is not None:
        gain, record = found
        message = f"the gradient grows {gain:.3g} times on its way back through it"
        cause = _magnifying_cause(record)
    elif targets is not None:
        cause = targets
    others = [other.name for _, other in worst if other is not record]
    limit = settings.limit("exploding_ratio", worst_record.name)
    yield GradNorm.violation(
        record, message, value=ratio, limit=limit, cause=cause, affected=others
    )


def _large_targets(observation: Observation) -> str | None:
    """Return the cause where a loss asks for outputs far larger than the model gives."""
    for call in observation.loss_calls:
        given, asked = call.input, call.target
        if given is None or asked is None or call.classes or not asked.finite_count:
            continue
        if asked.rms > _FAR_TARGETS * max(given.rms, 1.0):
            return (
                f"the targets have a root mean square of {asked.rms:.3g}, the outputs "
                f"{given.rms:.3g}: standardise the targets"
            )
    return None


_FAR_TARGETS = 100.0


def _magnifying_cause(record: LayerRecord) -> str:
    weights = _rms(list(record.parameters.values()))
    if max((found.scale for found in linear_maps(record)), default=0.0) < _GREAT:
        return (
            "what is computed between it and the layer before magnifies: a factor, a division by "
            "what is next to zero, or a root there"
        )
    return (
        f"its weights (root mean square {weights:.3g}) magnify what passes: initialised or grown "
        "too large for its width, with no normalisation around it"
    )


_GREAT = 10.0
"""The gain of weights that magnify; He et al. (2015) start at 1.41."""


def _vanishing(
    records: list[LayerRecord], observation: Observation, settings: Settings
) -> Iterator[Violation]:
    """Compare each layer's gradient with the largest of the layers that ran after it.

    Only the layers that ran first count: a gradient that vanished stays away from all of them. A
    branch of weak layers with strong ones before it is a gate (LayerScale, a fresh adapter). Where
    the loss reads a token that sees the others through such branches only, all layers lie behind a
    gate; then they count as they will once it is open.
    """
    pairs = [(ratio, r) for r in records if (ratio := _relative_gradient(r)) > 0.0]
    pairs.sort(key=lambda pair: completed(pair[1]))
    if len(pairs) < _FEWEST_LAYERS:
        return
    largest_after = list(accumulate((ratio for ratio, _ in reversed(pairs)), max))[::-1]
    weak = []
    gates: list[tuple[int, float]] | None = None
    for (gradient, record), largest in zip(pairs, largest_after, strict=True):
        limit = settings.limit("vanishing_ratio", record.name)
        if gradient >= limit.value * largest:
            break
        if gates is None:
            gates = list(_gates(observation, math.sqrt(limit.value) * largest))
        opened = min((part for end, part in gates if end > completed(record)), default=1.0)
        if gradient >= limit.value * largest * opened:
            break
        weak.append((gradient / largest, record))
    if weak:
        ratio, first = weak[0]
        limit = settings.limit("vanishing_ratio", first.name)
        others = [other.name for _, other in weak]
        found = _dominant_gain([record for _, record in pairs], grows=False)
        if found is None:
            message = f"its gradient is {ratio:.2g} of that in the layers after it: it vanished"
            cause = _uniform_cause([record for _, record in pairs], observation)
            yield GradNorm.violation(
                first, message, value=ratio, limit=limit, cause=cause, affected=others[1:]
            )
        else:
            gain, record = found
            message = f"the gradient shrinks to {gain:.2g} of itself on its way back through it"
            affected = [name for name in others if name != record.name]
            yield GradNorm.violation(
                record,
                message,
                value=ratio,
                limit=limit,
                cause=_shrinking_cause(record),
                affected=affected,
            )


def _gates(observation: Observation, healthy: float) -> Iterator[tuple[int, float]]:
    """Yield when each gate that starts nearly closed returned, and what part it lets through.

    The gradient before a gate is small by its start alone, and grows with its first steps: its own
    relative gradient is `healthy` or more.
    """
    for record in called(observation):
        if record.gradients is None or _relative_gradient(record) < healthy:
            continue
        maps = linear_maps(record)
        if maps:
            part = max(found.scale_by_fan_out for found in maps)
            if 0.0 < part < _SMALLEST_WEIGHT_RMS and _is_last(record, observation):
                yield completed(record), part
            continue
        for name in trainable(record):
            scale = record.parameters[name]
            is_small = is_scale(scale.shape) and 0.0 < scale.rms < _SMALLEST_WEIGHT_RMS
            if is_small and _is_gate(record, scale.rms, observation):
                yield completed(record), scale.rms


def _is_last(record: LayerRecord, observation: Observation) -> bool:
    """Whether no weights come after those of this layer: a head that starts near zero."""
    after = (r for r in called(observation) if (r.entered or 0) > completed(record))
    return not any(map(linear_maps, after))


def _is_gate(record: LayerRecord, scale: float, observation: Observation) -> bool:
    """Whether a layer multiplies a branch by its own `scale`, and adds that to what goes past it.

    Multiplication shows in the gradient, which is smaller by the scale before it; what goes past,
    in what comes after, which is not.
    """
    source = producer(observation, record)
    if source is not None and _is_scaled(source, record, scale):
        after = next(
            (
                r
                for r in called(observation)
                if (r.entered or 0) > completed(record)
                and not same_values(record.activations, r.inputs)
            ),
            None,
        )
        return after is not None and _goes_past(after.inputs, record.activations)
    return any(
        _is_scaled(inner, record, scale)
        and _goes_past(record.activations, inner.activations, scale)
        for inner in called(observation)
        if is_inside(inner.name, record.name)
    )


def _is_scaled(before: LayerRecord, record: LayerRecord, scale: float) -> bool:
    if before.gradients is None or record.gradients is None:
        return False
    expected = scale * record.gradients.rms
    return expected / _ABOUT <= before.gradients.rms <= expected * _ABOUT


def _goes_past(
    whole: TensorStatistics | None, branch: TensorStatistics | None, scale: float = 1.0
) -> bool:
    return whole is not None and branch is not None and whole.rms > _FAR * scale * branch.rms


_ABOUT, _FAR = 4.0, 10.0


def _gains(records: list[LayerRecord]) -> list[tuple[float, LayerRecord]]:
    """Return by how much the gradient grows on its way back through each layer.

    It is the gradient at the output of the layer before relative to that at the layer's own, so
    that the activation between the two counts with the later one.
    """
    passed = [r for r in records if r.gradients is not None and r.gradients.rms > 0.0]
    passed.sort(key=completed)
    return [
        (before.gradients.rms / record.gradients.rms, record)
        for before, record in pairwise(passed)
        if before.gradients is not None and record.gradients is not None
    ]


def _dominant_gain(records: list[LayerRecord], *, grows: bool) -> tuple[float, LayerRecord] | None:
    """Return the layer that makes most of the change all by itself, with its gain, if one does."""
    gains = _gains(records)
    if not gains:
        return None
    sign = 1.0 if grows else -1.0
    total = sign * math.fsum(math.log(gain) for gain, _ in gains)
    gain, record = max(gains, key=lambda pair: sign * pair[0])
    change = sign * math.log(gain)
    return (gain, record) if change >= _LEAST_SINGLE_CHANGE and 2 * change >= total else None


_LEAST_SINGLE_CHANGE = math.log(1e3)


def _shrinking_cause(record: LayerRecord) -> str:
    weight = record.parameters.get("weight")
    if weight is not None and weight.rms * math.sqrt(math.prod(weight.shape[1:])) < 0.01:
        return f"its weights are too small (root mean square {weight.rms:.3g}) to pass a signal"
    return (
        "the activation or arithmetic before it is flat for its inputs (saturated, clamped), or it "
        "multiplies by a factor near zero"
    )


def _uniform_cause(records: list[LayerRecord], observation: Observation) -> str:
    gains, cause = _gains(records), _vanishing_cause(records, observation)
    if not gains:
        return cause
    mean = math.exp(-math.fsum(math.log(gain) for gain, _ in gains) / len(gains))
    return f"it shrinks {mean:.3g} times a layer over {len(gains)} layers: {cause}"


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
