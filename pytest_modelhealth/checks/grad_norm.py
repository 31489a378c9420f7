"""Gradient norms within bounds: the user's, or what depth and the weights themselves explain.

One walk tells where a gradient is lost or grows: from a layer to the loss, at each step to that of
the next layers from which most of its gradient comes. What a step makes of it is a gain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.facts import (
    called,
    completed,
    enclosing,
    flow_of,
    innermost,
    is_fresh,
    is_scale,
    largest_at,
    linear_maps,
    seems_trained,
    trainable,
)
from pytest_modelhealth.checks.paths import (
    EDGED,
    QUOTIENTS,
    factors,
    first_of,
    named,
    nearest,
    way_to,
)
from pytest_modelhealth.report import Finding, LayerRecord, Observation
from pytest_modelhealth.settings import Limit, Settings
from pytest_modelhealth.settings.setting import dotted, is_inside
from pytest_modelhealth.statistics import TensorStatistics

GRAD_NORM = CHECKS["grad_norm"]

_SMALLEST_WEIGHT_RMS = 0.01


class _Walk:
    """The gradients of one run: each beside its weights, and where most of it came from."""

    def __init__(self, observation: Observation) -> None:
        self.observation, self.flow = observation, flow_of(observation)
        self.records = [  # with finite gradients; the others are `finite`'s
            record
            for record in called(observation)
            if record.parameter_gradients
            and not any(s.nonfinite_count for s in record.parameter_gradients.values())
        ]
        self.ratios = {record.name: _relative_gradient(record) for record in self.records}

    @cached_property
    def _near(self) -> dict[str, tuple[float, str]]:
        arrived = {r.name: r.gradients.rms for r in self.records if r.gradients is not None}
        return nearest(self.observation, arrived, back=True, by="gradient")

    def way(self, layer: str) -> list[LayerRecord]:
        """Return the layers from one to the loss that give most of its gradient, itself first."""
        return [self.observation.layers[name] for name in way_to(layer, self._near)[::-1]]

    def sigmoids(self, layer: str) -> list[LayerRecord]:
        """Return the functions of little slope that lie between a layer and the end of its way."""
        end = self.way(layer)[-1].name
        names = self.flow.reach(layer, by="gradient") & self.flow.feeding(end, by="gradient")
        steep = (r for r in called(self.observation) if r.activation in _STEEPEST)
        # past a gate leads another way
        return [r for r in steep if r.name in names and not self.flow.gate(r.name)]


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


def _norm(record: LayerRecord, observation: Observation) -> float:
    """Return the L2 norm of the gradients of a layer's own parameters.

    Over several batches it is the root mean square of theirs.
    """
    gradients = record.parameter_gradients.values()
    return math.sqrt(math.fsum(s.norm**2 for s in gradients) / observation.batches)


def findings(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield layers whose gradient norm is out of bounds."""
    walk = _Walk(observation)
    for record in walk.records:
        norm = _norm(record, observation)
        for name, word in (("max_grad_norm", "over"), ("min_grad_norm", "under")):
            limit = settings.exceeded(name, record.name, norm)
            if limit is not None:
                message = f"gradient norm {norm:.3g} is {word} {limit.value:g}"
                why = _what_makes_it(record, observation)
                yield GRAD_NORM.violation(record, message, value=norm, limit=limit, cause=why)
    exploding = list(_exploding(walk, settings))
    yield from list(_singular(walk, bool(exploding))) or exploding
    yield from list(_vanishing(walk, settings)) or _unmoving(walk)


def _what_makes_it(record: LayerRecord, observation: Observation) -> str:
    """Say what a gradient of weights is made of: inputs, what arrives, and what the loss sends."""
    sizes = (record.inputs, record.gradients, observation.layers[""].gradients)
    given, arrived, sent = (0.0 if s is None else s.rms for s in sizes)
    return (
        f"its inputs have a root mean square of {given:.3g}, what arrives {arrived:.3g}, what the "
        f"loss sends {sent:.3g}: the one that is far off tells whether inputs, the layers after it "
        "(weights, no normalisation) or the loss (a sum, a scale, targets) make it"
    )


# ---- gradients that explode ---------------------------------------------------------------------

_FAR_TARGETS = 100.0
_LARGE_AT_THE_OUTPUT = 100.0
"""A mean of errors around one sends less than one."""


def _exploding(walk: _Walk, settings: Settings) -> Iterator[Finding]:
    """Compare each layer's gradient with its own weights.

    A gradient that explodes does so in most layers on its way. In a single one it is what a
    normalisation makes of weights that start near zero: tokens of a vision transformer, embeddings
    of RWKV. What the loss sends back so large, in small units or times a scale, grows in no layer.
    """
    observation, layers = walk.observation, walk.observation.layers
    large = [
        record.name
        for record in sorted(walk.records, key=completed)
        if settings.exceeded("exploding_ratio", record.name, walk.ratios[record.name])
    ]
    if not large:
        return
    way = walk.way(large[0])
    around = {record.name for record in way} | walk.flow.feeding(large[0])
    around |= {r.name for r in walk.records if is_inside(r.name, large[0])}
    if 2 * len(around.intersection(large)) < len(around.intersection(walk.ratios)):
        return
    worst = layers[max(large, key=lambda name: walk.ratios[name])]
    ratio, limit = walk.ratios[worst.name], settings.limit("exploding_ratio", worst.name)
    gain, culprit, asked = _dominant_gain(way, grows=True), worst, _far_targets(observation)
    message = f"its gradient is {ratio:.3g} times as large as its weights (root mean square)"
    cause = asked or _what_makes_it(worst, observation)
    if gain is not None:
        size, before, culprit = gain
        message = f"the gradient grows {size:.3g} times on its way back through it"
        cause = _why_it_changes(observation, before, culprit, "magnifies")
    elif not asked and _is_of_the_loss(observation):
        return
    yield GRAD_NORM.violation(
        culprit,
        message,
        value=ratio,
        limit=limit,
        cause=cause,
        affected=[name for name in large if name != culprit.name],
        details=largest_at(worst, "gradients"),
    )


def _far_targets(observation: Observation) -> str:
    """Say that the loss asks for outputs far larger than the model gives, if it does."""
    for call in observation.loss_calls:
        given, asked = call.input, call.target
        if given and asked and asked.rms > _FAR_TARGETS * max(given.rms, 1.0) and not call.classes:
            return (
                f"the targets have a root mean square of {asked.rms:.3g}, the outputs "
                f"{given.rms:.3g}: standardise the targets"
            )
    return ""


def _is_of_the_loss(observation: Observation) -> bool:
    """Whether gradients are large before any layer."""
    sent = observation.layers[""].gradients
    return sent is not None and sent.norm > _LARGE_AT_THE_OUTPUT


_SINGULAR = 1e8
"""The most of 803 healthy runs is a norm of 9.8e5."""
_LEAST_JUMP = 1e3


def _singular(walk: _Walk, is_exploding: bool) -> Iterator[Finding]:
    """Yield where a gradient begins that is singular: by a root, norm or quotient near zero.

    That is where it jumps first on the way back.
    """
    observation = walk.observation
    norms = {record.name: _norm(record, observation) for record in walk.records}
    over = [record for record in walk.records if norms[record.name] > _SINGULAR]
    if not over:
        return
    last = max(over, key=completed)
    way = walk.way(last.name)
    sizes = [0.0 if r.gradients is None else r.gradients.rms for r in way]
    jumps = [n for n in range(len(way) - 1) if sizes[n] > _LEAST_JUMP * sizes[n + 1] > 0.0]
    culprit = way[jumps[-1]] if jumps else last
    ends = (culprit.name, way[jumps[-1] + 1].name) if jumps else (way[-1].name, "output", "loss")
    risky = first_of([v for v in walk.flow.operations(*ends) if v.live], EDGED, QUOTIENTS)
    if not risky and (is_exploding or _is_of_the_loss(observation)):
        return
    why = f"the backward of {named(risky)}: its derivative has no end where it is near zero"
    if not risky:
        why = "the derivative of a root, norm, logarithm or quotient near zero"
    yield GRAD_NORM.violation(
        culprit,
        f"the gradient norm of {last.label!r} is {norms[last.name]:.3g}, over {_SINGULAR:g}: a "
        "derivative on the way back is all but infinite",
        value=norms[last.name],
        limit=Limit(_SINGULAR, "always"),
        cause=f"{why}; add an epsilon inside a root or norm, or to a denominator",
        affected=[r.name for r in over if r is not culprit],
        details=largest_at(last, "gradients"),
    )


# ---- gradients that vanish ----------------------------------------------------------------------

_STEEPEST = {"sigmoid": 0.25, "hardsigmoid": 1 / 6}
"""The largest slope of those that shrink a gradient wherever their inputs lie."""
_FEWEST_LAYERS = 4
_FEWEST_SIGMOIDS = 6
_CHAIN_RATIO = 1e-4
"""AutoTrainer's first layer by its last is 1e-3, with a norm of 1e-4."""
_NEXT_TO_ZERO = 1e-6


def _vanishing(walk: _Walk, settings: Settings) -> Iterator[Finding]:
    """Compare each layer's gradient with the largest of the layers after it, on its way back.

    Only layers that no other feeds count: a gradient that vanished stays away from all of them. A
    branch of weak layers with strong ones before it is a gate (LayerScale, a fresh adapter). Where
    the loss reads a token that sees the others through such branches only, all layers lie behind a
    gate; then they count as they will once it is open. Sigmoids take three quarters and more each,
    so that a fresh model behind many of them is held to a nearer limit.
    """
    flow, parts = walk.flow, _parts(walk)
    limits = _limits(walk, parts, settings)
    if len(parts) < _FEWEST_LAYERS or all(p >= limits[n].value for n, p in parts.items()):
        return
    gates = _gates(walk)
    opened = flow.sweep(
        lambda layer, came: min(gates.get(layer, 1.0), 1.0 if came is None else came),
        min,
        back=True,
        by="gradient",
    )
    weak = {name for name in parts if parts[name] < limits[name].value * opened.get(name, 1.0)}
    strong = parts.keys() - weak
    fed = flow.sweep(lambda layer, came: came or layer in strong or None, max, by="gradient")
    starved = [r for r in sorted(walk.records, key=completed) if r.name in weak - fed.keys()]
    explained: set[str] = set()
    for first in starved:
        weights = [s for s in trainable(first).values() if not is_scale(s.shape)]
        is_starting = all(s.rms <= _NEXT_TO_ZERO for s in weights)
        if first.name in explained or is_starting:
            continue
        behind = {r.name for r in starved} & flow.reach(first.name, by="gradient")
        others = {r.name for r in starved} & {*behind, *flow.feeding(*behind)} - {first.name}
        explained |= others
        part = parts[first.name]
        culprit, message, cause = _where_it_vanished(walk, walk.way(first.name), part)
        yield GRAD_NORM.violation(
            culprit,
            message,
            value=part,
            limit=limits[first.name],
            cause=cause,
            affected=[r.name for r in starved if r.name in {first.name, *others} - {culprit.name}],
        )


def _parts(walk: _Walk) -> dict[str, float]:
    """Return the gradient of each layer as a part of the largest of the layers after it."""
    ratios = {name: ratio for name, ratio in walk.ratios.items() if ratio > 0.0}
    after = walk.flow.sweep(
        lambda layer, came: max(ratios.get(layer, 0.0), came or 0.0), max, back=True, by="gradient"
    )
    return {name: ratio / max(ratio, after.get(name, 0.0)) for name, ratio in ratios.items()}


def _limits(walk: _Walk, parts: dict[str, float], settings: Settings) -> dict[str, Limit]:
    """Return the least part of a gradient that each layer may get, nearer behind many sigmoids."""
    chained = set[str]()
    weak = [name for name, part in parts.items() if part < _CHAIN_RATIO]
    steep = sum(r.calls for r in called(walk.observation) if r.activation in _STEEPEST)
    is_normalised = any("_norm" in v.function for v in walk.flow.graph.vertices)
    if (
        weak
        and steep >= _FEWEST_SIGMOIDS
        and not is_normalised
        and not seems_trained(walk.observation)
    ):
        for name in weak:
            if sum(record.calls for record in walk.sigmoids(name)) >= _FEWEST_SIGMOIDS:
                chained.update(record.name for record in walk.way(name))
    near = Limit(_CHAIN_RATIO, "always")
    return {n: near if n in chained else settings.limit("vanishing_ratio", n) for n in parts}


def lost_behind_sigmoids(observation: Observation, settings: Settings) -> bool:
    """Whether a layer gets next to no gradient as sigmoids take most of it, one after another."""
    walk = _Walk(observation)
    parts = _parts(walk)
    return any(parts[n] < limit.value for n, limit in _limits(walk, parts, settings).items())


def _gates(walk: _Walk) -> dict[str, float]:
    """Return what part each gate that starts nearly closed lets through.

    The gradient before a gate is small by its start alone, and grows with its first steps. It
    scales a branch that is added to what goes past it, or is the end of the model.
    """
    gates = dict[str, float]()
    weighted = {r.name: 1.0 for r in called(walk.observation) if linear_maps(r)}
    before_weights = nearest(walk.observation, weighted, back=True)
    for record in walk.records:
        parts = [s.rms for s in trainable(record).values() if is_scale(s.shape)]
        parts += [max((m.scale_by_fan_out for m in linear_maps(record)), default=0.0)]
        small = [part for part in parts if 0.0 < part < _SMALLEST_WEIGHT_RMS]
        own = [dotted(record.name, name) for name in record.parameters]
        is_added = any(map(walk.flow.is_added, (*enclosing(record.name), *own)))
        if small and (is_added or record.name not in before_weights):
            gates[record.name] = min(small)
    return gates


def _where_it_vanished(
    walk: _Walk, way: list[LayerRecord], part: float
) -> tuple[LayerRecord, str, str]:
    """Return the culprit on the way of a gradient that vanished, what to say of it, and the cause.

    It is the layer that the gradient shrinks in, or the first of the way, behind all that do so.
    """
    gain = _dominant_gain(way, grows=False)
    if gain is not None:
        size, before, culprit = gain
        message = f"the gradient shrinks to {size:.2g} of itself on its way back through it"
        return culprit, message, _why_it_changes(walk.observation, before, culprit, "shrinks")
    message = f"its gradient is {part:.2g} of that in the layers after it: it vanished"
    cause = "weights too small, saturated activations, no normalisation or no residual path"
    kinds = dict.fromkeys(str(r.activation) for r in walk.sigmoids(way[0].name))
    slopes = "".join(f", {kind} (a slope of {_STEEPEST[kind]:.3g} at most)" for kind in kinds)
    sizes = [r.gradients.rms for r in way if linear_maps(r) and r.gradients]
    if len(sizes) > 1 and sizes[0]:
        count = len(sizes) - 1
        factor = (sizes[-1] / sizes[0]) ** (1.0 / count)
        cause = f"it shrinks {factor:.3g} times a layer over {count} layers{slopes}: {cause}"
    return way[0], message, cause


# ---- what a step of the way makes of a gradient -------------------------------------------------

_LEAST_SINGLE_CHANGE = math.log(1e3)
_GREAT = 10.0
"""The gain of weights that magnify; He et al. (2015) start at 1.41."""


def _dominant_gain(
    way: list[LayerRecord], *, grows: bool
) -> tuple[float, LayerRecord, LayerRecord] | None:
    """Return the gain that makes most of the change all by itself, with its layers, if one does.

    It is the gradient at the output of the layer before relative to that at the layer's own.
    """
    gains = [
        (before.gradients.rms / record.gradients.rms, before, record)
        for before, record in pairwise(way)
        if before.gradients and record.gradients and before.gradients.rms and record.gradients.rms
    ]
    if not gains:
        return None
    sign = 1.0 if grows else -1.0
    total = sign * math.fsum(math.log(gain) for gain, _, _ in gains)
    largest = max(gains, key=lambda gain: sign * gain[0])
    change = sign * math.log(largest[0])
    return largest if change >= _LEAST_SINGLE_CHANGE and 2 * change >= total else None


def _why_it_changes(
    observation: Observation, before: LayerRecord, layer: LayerRecord, verb: str
) -> str:
    """Say whether a layer's weights change what passes back through it, or what is around them."""
    gains = [m.scale_by_fan_out for m in linear_maps(layer)]
    if gains and not 1.0 / _GREAT < max(gains) < _GREAT:
        return (
            f"its weights (root mean square {_rms([*layer.parameters.values()]):.3g}) are too "
            f"{'large' if max(gains) > 1.0 else 'small'} for its width, with no normalisation "
            "around it"
        )
    return (
        f"what is computed between {before.label!r} and it {verb} what comes back: a factor, a "
        "division, a root, or an activation that is flat for its inputs"
        f"{factors(observation, [before.name], layer.name)}"
    )


# ---- gradients that move nothing ----------------------------------------------------------------

_UNMOVING = 1e-10
"""Adam adds 1e-8 to its denominator; the least of 803 healthy runs is 7.7e-6."""
_LEARNT = 1e-4
"""A loss below this may be learnt: its gradients are as small with nothing wrong."""
_MOST_BY_LOSS = 10.0


def _unmoving(walk: _Walk) -> Iterator[Finding]:
    """Yield that every gradient is too small to move a parameter.

    In float64 a fit may end so: it is only warned of there.
    """
    observation, root = walk.observation, walk.observation.layers[""]
    gradients = [s for record in walk.records for s in record.parameter_gradients.values()]
    largest = max((s.abs_max for s in gradients), default=0.0)
    loss, sent = observation.loss, root.gradients
    if not 0.0 < largest < _UNMOVING or loss is None:
        return
    # Near its end a loss is small beside its gradient, as a square is beside what was squared; a
    # factor makes both small. The losses of classes end with both: only a fresh model is judged.
    is_scaled = sent is not None and 0.0 < sent.norm <= _MOST_BY_LOSS * abs(loss)
    is_fresh_alone = is_fresh(observation) and not seems_trained(observation)
    if abs(loss) <= _LEARNT and not (is_scaled and is_fresh_alone):
        return
    # the last layer at whose output the gradient is usual, and why it is not before
    culprit = root
    why = "the loss itself sends nothing back: a factor near zero, or an output so far out that it "
    why += "is flat there"
    if sent is not None and sent.abs_max >= _UNMOVING:
        for record in sorted(innermost(called(observation)), key=completed, reverse=True):
            if record.gradients is not None and record.gradients.count:
                if record.gradients.abs_max < _UNMOVING:
                    break
                culprit = record
        given = culprit.inputs
        inputs = f" (inputs in [{given.min:.3g}, {given.max:.3g}])" if given else ""
        why = (
            f"what comes back through {culprit.label!r} is lost: it is flat for its inputs"
            f"{inputs}, or multiplied by next to nothing"
        )
    yield GRAD_NORM.violation(
        culprit,
        f"the largest number in all gradients is {largest:.3g} while the loss is {loss:.3g}: no "
        "optimizer moves a parameter by it",
        value=largest,
        limit=Limit(_UNMOVING, "always"),
        role="gradients",
        cause=why,
        affected=[r.name for r in walk.records if r is not culprit],
        severity="warn" if all(s.dtype == "float64" for s in gradients) else "fail",
    )
