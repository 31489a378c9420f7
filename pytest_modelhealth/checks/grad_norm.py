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
            for record in sorted(called(observation), key=completed)
            if record.parameter_gradients
            and not any(s.nonfinite_count for s in record.parameter_gradients.values())
        ]
        self.norms = {record.name: _norm(record, observation) for record in self.records}
        self.ratios = {record.name: _relative_gradient(record) for record in self.records}
        sent = observation.layers[""].gradients
        self.sent = 0.0 if sent is None else sent.norm
        """The norm of what the loss sends back; a mean of errors around one sends less than one."""

    @cached_property
    def _near(self) -> dict[str, tuple[float, str]]:
        arrived = {r.name: r.gradients.rms for r in self.records if r.gradients is not None}
        return nearest(self.observation, arrived, back=True, by="gradient")

    def way(self, layer: str) -> list[LayerRecord]:
        """Return the layers from one to the loss that give most of its gradient, itself first."""
        return [self.observation.layers[name] for name in way_to(layer, self._near)[::-1]]


def _relative_gradient(record: LayerRecord) -> float:
    """Return the layer's gradient relative to its weights, both as root mean squares.

    Weights near zero (a zero-initialised output, a fresh adapter) have no scale of their own and
    count as 0.01.
    """
    names = [name for name in trainable(record) if name in record.parameter_gradients]
    weights = _rms([record.parameters[name] for name in names])
    gradients = _rms([record.parameter_gradients[name] for name in names])
    return gradients / max(weights, _SMALLEST_WEIGHT_RMS)


def _rms(statistics: list[TensorStatistics]) -> float:
    count = sum(s.finite_count for s in statistics)
    return math.sqrt(math.fsum(s.norm**2 for s in statistics) / count) if count else 0.0


def _norm(record: LayerRecord, observation: Observation) -> float:
    """Return the L2 norm of a layer's gradients; over several batches, the root mean square."""
    gradients = record.parameter_gradients.values()
    return math.sqrt(math.fsum(s.norm**2 for s in gradients) / observation.batches)


def findings(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield layers whose gradient norm is out of bounds."""
    walk = _Walk(observation)
    for record in walk.records:
        norm, why = walk.norms[record.name], _what_makes_it(record, observation)
        for name, word in (("max_grad_norm", "over"), ("min_grad_norm", "under")):
            if (limit := settings.exceeded(name, record.name, norm)) is not None:
                message = f"gradient norm {norm:.3g} is {word} {limit.value:g}"
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


def _exploding(walk: _Walk, settings: Settings) -> Iterator[Finding]:
    """Compare each layer's gradient with its own weights.

    A gradient that explodes does so in most layers on its way. In a single one it is what a
    normalisation makes of weights that start near zero: tokens of a vision transformer, embeddings
    of RWKV. What the loss sends back so large, in small units or times a scale, grows in no layer.
    """
    observation, ratios = walk.observation, walk.ratios
    large = [n for n, ratio in ratios.items() if settings.exceeded("exploding_ratio", n, ratio)]
    if not large:
        return
    way = walk.way(large[0])
    around = {record.name for record in way} | walk.flow.feeding(large[0])
    around |= {name for name in ratios if is_inside(name, large[0])}
    if 2 * len(around.intersection(large)) < len(around.intersection(ratios)):
        return
    worst = observation.layers[max(large, key=lambda name: ratios[name])]
    ratio, culprit = ratios[worst.name], worst
    message = f"its gradient is {ratio:.3g} times as large as its weights (root mean square)"
    cause = _far_targets(observation)
    if (gain := _dominant_gain(way, grows=True)) is not None:
        size, before, culprit = gain
        message = f"the gradient grows {size:.3g} times on its way back through it"
        cause = _why_it_changes(observation, before, culprit, "magnifies")
    elif not cause and walk.sent > _LARGE_AT_THE_OUTPUT:
        return
    yield GRAD_NORM.violation(
        culprit,
        message,
        value=ratio,
        limit=settings.limit("exploding_ratio", worst.name),
        cause=cause or _what_makes_it(worst, observation),
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


_SINGULAR = 1e8
"""The most of 803 healthy runs is a norm of 9.8e5."""
_LEAST_JUMP = 1e3


def _singular(walk: _Walk, is_exploding: bool) -> Iterator[Finding]:
    """Yield where a gradient begins that is singular: by a root, norm or quotient near zero.

    That is where it jumps first on the way back.
    """
    over = [record for record in walk.records if walk.norms[record.name] > _SINGULAR]
    if not over:
        return
    last, why = over[-1], "the derivative of a root, norm, logarithm or quotient near zero"
    culprit, ends = last, [walk.way(last.name)[-1].name, "output", "loss"]
    for record, after in pairwise(walk.way(last.name)):
        size, sent = (0.0 if r.gradients is None else r.gradients.rms for r in (record, after))
        if size > _LEAST_JUMP * sent > 0.0:
            culprit, ends = record, [record.name, after.name]
    if risky := first_of([v for v in walk.flow.operations(*ends) if v.live], EDGED, QUOTIENTS):
        why = f"the backward of {named(risky)}: its derivative has no end where it is near zero"
    elif is_exploding or walk.sent > _LARGE_AT_THE_OUTPUT:
        return
    yield GRAD_NORM.violation(
        culprit,
        f"the gradient norm of {last.label!r} is {walk.norms[last.name]:.3g}, over "
        f"{_SINGULAR:g}: a derivative on the way back is all but infinite",
        value=walk.norms[last.name],
        limit=Limit(_SINGULAR, "always"),
        cause=f"{why}; add an epsilon inside a root or norm, or to a denominator",
        affected=[r.name for r in over if r is not culprit],
        details=largest_at(last, "gradients"),
    )


# ---- gradients that vanish ----------------------------------------------------------------------

_STEEPEST = {"sigmoid": 0.25, "hardsigmoid": 1 / 6}
"""The largest slope of those that shrink a gradient wherever their inputs lie."""
_FEWEST_SIGMOIDS = 6
_CHAIN_RATIO = 1e-4
"""AutoTrainer's first layer by its last is 1e-3, with a norm of 1e-4."""
_NEXT_TO_ZERO = 1e-6


def _vanishing(walk: _Walk, settings: Settings) -> Iterator[Finding]:
    """Compare each layer's gradient with the largest of the layers after it, on its way back.

    Only layers that no other feeds count: a gradient that vanished stays away from all of them. A
    branch of weak layers with strong ones before it is a gate (LayerScale, a fresh adapter). Where
    the loss reads a token that sees the others through such branches only, all layers lie behind a
    gate; then they count as they will once it is open.
    """
    flow, parts = walk.flow, _parts(walk)
    limits = _limits(walk, parts, settings)
    if all(part >= limits[name].value for name, part in parts.items()):
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
    starved = [r for r in walk.records if r.name in weak - fed.keys()]
    left = {record.name for record in starved}
    for first in starved:
        weights = [s for s in trainable(first).values() if not is_scale(s.shape)]
        if first.name not in left or all(s.rms <= _NEXT_TO_ZERO for s in weights):
            continue  # it is explained, or starts at zero itself
        behind = flow.reach(first.name, by="gradient") & {r.name for r in starved}
        others = {r.name for r in starved} & {first.name, *behind, *flow.feeding(*behind)}
        left -= others
        culprit, message, cause = _where_it_vanished(walk, first, parts[first.name])
        yield GRAD_NORM.violation(
            culprit,
            message,
            value=parts[first.name],
            limit=limits[first.name],
            cause=cause,
            affected=[r.name for r in starved if r.name in others - {culprit.name}],
        )


def _parts(walk: _Walk) -> dict[str, float]:
    """Return the gradient of each layer as a part of the largest of the layers after it."""
    ratios = {name: ratio for name, ratio in walk.ratios.items() if ratio > 0.0}
    after = walk.flow.sweep(
        lambda layer, came: max(ratios.get(layer, 0.0), came or 0.0), max, back=True, by="gradient"
    )
    return {name: ratio / max(ratio, after.get(name, 0.0)) for name, ratio in ratios.items()}


def _limits(walk: _Walk, parts: dict[str, float], settings: Settings) -> dict[str, Limit]:
    """Return the least part of a gradient that each layer may get.

    Sigmoids take three quarters and more each: a fresh model that does not normalise is held to a
    nearer limit behind many of them. Past one that is a gate leads another way.
    """
    observation, flow, chained = walk.observation, walk.flow, set[str]()
    steep = [r for r in called(observation) if r.activation in _STEEPEST and not flow.gate(r.name)]
    is_normalised = any("_norm" in v.function for v in flow.graph.vertices)
    weak = [name for name, part in parts.items() if part < _CHAIN_RATIO]
    if is_normalised or seems_trained(observation):
        weak = []
    for name in weak:
        way = {record.name: None for record in walk.way(name)}
        between = flow.reach(name, by="gradient") & flow.feeding([*way][-1], by="gradient")
        if sum(record.calls for record in steep if record.name in between) >= _FEWEST_SIGMOIDS:
            chained.update(way)
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
    walk: _Walk, first: LayerRecord, part: float
) -> tuple[LayerRecord, str, str]:
    """Return the culprit on the way of a gradient that vanished, what to say of it, and the cause.

    It is the layer that the gradient shrinks in, or the first of the way, behind all that do so.
    """
    way = walk.way(first.name)
    if (gain := _dominant_gain(way, grows=False)) is not None:
        size, before, culprit = gain
        message = f"the gradient shrinks to {size:.2g} of itself on its way back through it"
        return culprit, message, _why_it_changes(walk.observation, before, culprit, "shrinks")
    cause = "weights too small, saturated activations, no normalisation or no residual path"
    sizes = [r.gradients.rms for r in way if linear_maps(r) and r.gradients]
    if len(sizes) > 1 and sizes[0]:
        count = len(sizes) - 1
        factor = (sizes[-1] / sizes[0]) ** (1.0 / count)
        kinds = {str(r.activation) for r in called(walk.observation)} & _STEEPEST.keys()
        slopes = "".join(f", {k} (a slope of {_STEEPEST[k]:.3g} at most)" for k in sorted(kinds))
        cause = f"it shrinks {factor:.3g} times a layer over {count} layers{slopes}: {cause}"
    return first, f"its gradient is {part:.2g} of that in the layers after it: it vanished", cause


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
    largest = max(gains, key=lambda gain: sign * gain[0])
    change, total = math.log(largest[0]), math.fsum(math.log(gain) for gain, _, _ in gains)
    return largest if sign * change >= max(_LEAST_SINGLE_CHANGE, sign * total / 2) else None


def _why_it_changes(
    observation: Observation, before: LayerRecord, layer: LayerRecord, verb: str
) -> str:
    """Say whether a layer's weights change what passes back through it, or what is around them."""
    gain = max((m.scale_by_fan_out for m in linear_maps(layer)), default=1.0)
    if not 1.0 / _GREAT < gain < _GREAT:
        return (
            f"its weights (root mean square {_rms([*layer.parameters.values()]):.3g}) are too "
            f"{'large' if gain > 1.0 else 'small'} for its width, with no normalisation around it"
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
    observation, culprit = walk.observation, walk.observation.layers[""]
    gradients = [s for record in walk.records for s in record.parameter_gradients.values()]
    largest, loss = max((s.abs_max for s in gradients), default=0.0), observation.loss
    if not 0.0 < largest < _UNMOVING or loss is None:
        return
    # Near its end a loss is small beside its gradient, as a square is beside what was squared; a
    # factor makes both small. The losses of classes end with both: only a fresh model is judged.
    is_scaled = 0.0 < walk.sent <= _MOST_BY_LOSS * abs(loss) and is_fresh(observation)
    if abs(loss) <= _LEARNT and not is_scaled:
        return
    why = "the loss itself sends nothing back: a factor near zero, or an output so far out that it "
    why += "is flat there"
    if culprit.gradients is not None and culprit.gradients.abs_max >= _UNMOVING:
        # the last layer at whose output the gradient is usual, and why it is not before
        for record in reversed(innermost(called(observation))):
            if record.gradients is not None and record.gradients.count:
                if record.gradients.abs_max < _UNMOVING:
                    break
                culprit = record
        given = culprit.inputs
        inputs = f" (inputs in [{given.min:.3g}, {given.max:.3g}])" if given else ""
        why = (
            f"what comes back through {culprit.label!r} is lost: it is flat for its inputs{inputs}"
        )
        why += ", or multiplied by next to nothing"
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
