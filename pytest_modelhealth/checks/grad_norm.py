"""Gradient norms within bounds: the user's, or what depth and the weights themselves explain.

One walk tells where a gradient is lost or grows: from a layer to the loss, at each step to that of
the next layers from which most of its gradient comes. What a step makes of it is a gain.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
    listed,
    seems_trained,
    trainable,
)
from pytest_modelhealth.checks.paths import UNDERIVABLE, factors, first_of, named, nearest, way_to
from pytest_modelhealth.report import Finding, LayerRecord, Observation
from pytest_modelhealth.settings import Limit, Settings
from pytest_modelhealth.settings.setting import dotted, is_inside
from pytest_modelhealth.statistics import TensorStatistics

GRAD_NORM = CHECKS["grad_norm"]

_SMALLEST_WEIGHT_RMS = 0.01
_BOUNDS = (("max_grad_norm", "over"), ("min_grad_norm", "under"))


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
        self.ratios = {record.name: _relative_gradient(record) for record in self.records}
        self.sent = sent.norm if (sent := observation.layers[""].gradients) else 0.0
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
    learning = trainable(record)
    both = [(learning[n], s) for n, s in record.parameter_gradients.items() if n in learning]
    weights, gradients = (_rms(seen) for seen in zip(*both, strict=True)) if both else (0.0, 0.0)
    return gradients / max(weights, _SMALLEST_WEIGHT_RMS)


def _gain(record: LayerRecord) -> float:
    """Return by how much the weights of a layer change the scale of a gradient."""
    return max((m.scale_by_fan_out for m in linear_maps(record)), default=1.0)


def _rms(statistics: Sequence[TensorStatistics]) -> float:
    count = sum([s.finite_count for s in statistics])
    return math.sqrt(math.fsum([s.norm**2 for s in statistics]) / count) if count else 0.0


def findings(observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield layers whose gradient norm is out of bounds."""
    walk = _Walk(observation)
    for record in walk.records:
        bounds = [one for one in _BOUNDS if settings.limit(one[0], record.name).value is not None]
        if not bounds:
            continue
        # the L2 norm; over several batches, the root mean square of theirs
        squares = math.fsum(s.norm**2 for s in record.parameter_gradients.values())
        norm = math.sqrt(squares / observation.batches)
        for name, word in bounds:
            if (limit := settings.exceeded(name, record.name, norm)) is not None:
                message = f"gradient norm {norm:.3g} is {word} {limit.value:g}"
                cause = _what_makes_it(record, observation)
                yield GRAD_NORM.violation(record, message, value=norm, limit=limit, cause=cause)
    yield from _exploding(walk, settings)
    yield from list(_vanishing(walk, settings)) or _unmoving(walk)


def _what_makes_it(record: LayerRecord, observation: Observation) -> str:
    """Say what a gradient of weights is made of: inputs, what arrives, and what the loss sends."""
    sizes = (record.inputs, record.gradients, observation.layers[""].gradients)
    given, arrived, sent = (0.0 if s is None else s.rms for s in sizes)
    return (
        f"its inputs have a root mean square of {given:.3g}, what arrives {arrived:.3g}, what the "
        f"loss sends {sent:.3g}: the one that is far off makes it (inputs; weights after it and no "
        "normalisation; a sum, a scale or targets of the loss)"
    )


_FAR_TARGETS = 100.0
_LARGE_AT_THE_OUTPUT = 100.0
_SINGULAR = 1e8
"""One layer alone may not reach it; the most that it does in 1,302 healthy runs is 8.6e6."""
_ENDLESS = (
    "the derivative of a root, norm, logarithm or quotient has no end near zero: add an epsilon "
    "inside a root or norm, or to a denominator"
)


def _exploding(walk: _Walk, settings: Settings) -> Iterator[Finding]:
    """Compare each layer's gradient with its own weights.

    A gradient that explodes does so in most layers on its way. In a single one it is what a
    normalisation makes of weights that start near zero: tokens of a vision transformer, embeddings
    of RWKV; or it is singular. What the loss sends back so large, in small units or times a scale,
    grows in no layer.
    """
    observation, ratios = walk.observation, walk.ratios
    large = [n for n, ratio in ratios.items() if settings.exceeded("exploding_ratio", n, ratio)]
    if not large:
        return
    worst = observation.layers[max(large, key=lambda name: ratios[name])]
    ratio, way = ratios[worst.name], walk.way(large[0])
    around = {record.name for record in way} | walk.flow.feeding(large[0])
    around |= {name for name in ratios if is_inside(name, large[0])}
    is_singular = ratio > _SINGULAR
    if not is_singular and 2 * len(around.intersection(large)) < len(around.intersection(ratios)):
        return
    change, cause = _single_change(walk, way, 1.0), ""
    for call in observation.loss_calls:
        given, asked = call.input, call.target
        if given and asked and asked.rms > _FAR_TARGETS * max(given.rms, 1.0) and not call.classes:
            cause = f"the targets have a root mean square of {asked.rms:.3g}, the outputs "
            cause += f"{given.rms:.3g}: standardise the targets"
    risky = _risky(walk, way[-1].name, "output", "loss") if is_singular else ""
    if not (change or risky or cause) and walk.sent > _LARGE_AT_THE_OUTPUT:
        return
    message = f"its gradient is {ratio:.3g} times as large as its weights (root mean square)"
    cause = risky or cause or _what_makes_it(worst, observation) + f"; {_ENDLESS}" * is_singular
    culprit, message, cause = change or (worst, message, cause)
    yield GRAD_NORM.violation(
        culprit,
        message,
        value=ratio,
        limit=settings.limit("exploding_ratio", worst.name),
        cause=cause,
        affected=[name for name in large if name != culprit.name],
        details=largest_at(worst, "gradients"),
    )


def _risky(walk: _Walk, *ends: str) -> str:
    """Say which operations on a way have a derivative without end, if any have."""
    risky = first_of([v for v in walk.flow.operations(*ends) if v.live], *UNDERIVABLE[:2])
    return f"the backward of {named(risky)}: {_ENDLESS}" if risky else ""


_STEEP = frozenset({"sigmoid", "hardsigmoid"})
"""What takes three quarters of a gradient and more, wherever its inputs lie."""
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
    opened = dict[str, float]()
    if gates:
        opened = flow.sweep(
            lambda n, came: min(gates.get(n, 1.0), came or 1.0), min, back=True, by="gradient"
        )
    weak = {name for name in parts if parts[name] < limits[name].value * opened.get(name, 1.0)}
    strong = parts.keys() - weak
    fed = flow.sweep(lambda layer, came: came or layer in strong or None, max, by="gradient")
    starved = [
        record
        for record in walk.records
        if record.name in weak - fed.keys()
        and any(s.rms > _NEXT_TO_ZERO for s in trainable(record).values() if not is_scale(s.shape))
    ]
    if not starved:
        return
    first, part, way = starved[0], parts[starved[0].name], walk.way(starved[0].name)
    message = f"its gradient is {part:.2g} of that in the layers after it: it vanished"
    fading = first, message, _why_it_fades(walk, way)
    culprit, message, cause = _single_change(walk, way, -1.0) or fading
    yield GRAD_NORM.violation(
        culprit,
        message,
        value=part,
        limit=limits[first.name],
        cause=cause,
        affected=[r.name for r in starved if r is not culprit],
    )


def _why_it_fades(walk: _Walk, way: list[LayerRecord]) -> str:
    """Say by how much a gradient shrinks a layer, where none of them makes most of it."""
    cause = "weights too small, saturated activations, no normalisation or no residual path"
    sizes = [r.gradients.rms for r in way if linear_maps(r) and r.gradients]
    if len(sizes) < 2 or not sizes[0]:
        return cause
    factor = (sizes[-1] / sizes[0]) ** (1.0 / (len(sizes) - 1))
    small = {repr(r.label): gain for r in way if (gain := _gain(r)) < 1.0 / _GREAT}
    if small and math.prod(small.values()) < math.sqrt(sizes[0] / sizes[-1]):
        cause = f"the weights of {listed(small)} are too small, and nothing normalises"
    elif any(record.activation in _STEEP for record in called(walk.observation)):
        cause = f"sigmoids (a slope of 0.25 at most), {cause}"
    return f"it shrinks {factor:.3g} times a layer over {len(sizes) - 1} layers: {cause}"


def _parts(walk: _Walk) -> dict[str, float]:
    """Return the gradient of each layer as a part of the largest of the layers after it."""
    ratios = {name: ratio for name, ratio in walk.ratios.items() if ratio > 0.0}
    after = walk.flow.sweep(
        lambda layer, came: max(ratios.get(layer, 0.0), came or 0.0), max, back=True, by="gradient"
    )
    return {name: ratio / max(ratio, after.get(name, 0.0)) for name, ratio in ratios.items()}


def _limits(walk: _Walk, parts: dict[str, float], settings: Settings) -> dict[str, Limit]:
    """Return the least part of a gradient that each layer may get.

    A fresh model that does not normalise is held to a nearer one behind many sigmoids; past one
    that is a gate leads another way.
    """
    observation, flow, chained = walk.observation, walk.flow, set[str]()
    steep = [r for r in called(observation) if r.activation in _STEEP and not flow.is_gated(r.name)]
    is_normalised = any("_norm" in v.function for v in flow.graph.vertices)
    if steep and not is_normalised and not seems_trained(observation):
        for name in (name for name, part in parts.items() if part < _CHAIN_RATIO):
            way = [record.name for record in walk.way(name)]
            between = flow.reach(name, by="gradient") & flow.feeding(way[-1], by="gradient")
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
    small = dict[str, float]()
    for record in walk.records:
        parts = [s.rms for s in trainable(record).values() if is_scale(s.shape)]
        if parts := [part for part in (*parts, _gain(record)) if 0.0 < part < _SMALLEST_WEIGHT_RMS]:
            small[record.name] = min(parts)
    weighted = {r.name: 1.0 for r in called(walk.observation) if linear_maps(r)} if small else {}
    before_weights = nearest(walk.observation, weighted, back=True) if small else {}
    for name in before_weights.keys() & small.keys():
        own = (dotted(name, parameter) for parameter in walk.observation.layers[name].parameters)
        if not any(map(walk.flow.is_added, (*enclosing(name), *own))):
            del small[name]
    return small


_LEAST_SINGLE_CHANGE = math.log(1e3)
_GREAT = 10.0
"""The gain of weights that magnify; He et al. (2015) start at 1.41."""


def _single_change(
    walk: _Walk, way: list[LayerRecord], sign: float
) -> tuple[LayerRecord, str, str] | None:
    """Return the layer that makes most of the change all by itself, what to say, and the cause.

    A gain is the gradient at the output of the layer before relative to that at the layer's own;
    its logarithm has the sign that is asked for. The cause is its weights, or what is around them.
    """
    gains = [
        (sign * math.log(before.gradients.rms / layer.gradients.rms), before, layer)
        for before, layer in pairwise(way)
        if before.gradients and layer.gradients and before.gradients.rms and layer.gradients.rms
    ]
    total = math.fsum(change for change, _, _ in gains)
    change, before, layer = max(gains, key=lambda gain: gain[0], default=(0.0, way[0], way[0]))
    if change < max(_LEAST_SINGLE_CHANGE, total / 2):
        return None
    how, verb = f"shrinks to {math.exp(-change):.2g} of itself", "shrinks"
    if sign > 0.0:
        how, verb = f"grows {math.exp(change):.3g} times", "magnifies"
    message = f"the gradient {how} on its way back through it"
    gain = _gain(layer)
    if not 1.0 / _GREAT < gain < _GREAT:
        size = f"too {'large' if gain > 1.0 else 'small'} for its width"
        rms = _rms([*layer.parameters.values()])
        cause = f"its weights (root mean square {rms:.3g}) are {size}, and nothing normalises"
        return layer, message, cause
    if sign > 0.0 and (risky := _risky(walk, before.name, layer.name)):
        return before, f"{message} before {layer.label!r}", risky
    cause = f"what is computed between {before.label!r} and it {verb} what comes back: a factor, a "
    cause += "division, a root, or an activation that is flat for its inputs"
    return layer, message, cause + factors(walk.observation, [before.name], layer.name)


_UNMOVING = 1e-10
"""Adam adds 1e-8 to its denominator; the least of 803 healthy runs is 7.7e-6."""
_LEARNT = 1e-4
"""A loss below this may be learnt: its gradients are as small with nothing wrong."""
_MOST_BY_LOSS = 10.0


def _unmoving(walk: _Walk) -> Iterator[Finding]:
    """Yield that every gradient is too small to move a parameter.

    In float64 a fit may end so: it is only warned of there.
    """
    observation, loss = walk.observation, walk.observation.loss
    gradients = [s for record in walk.records for s in record.parameter_gradients.values()]
    largest = max((s.abs_max for s in gradients), default=0.0)
    if not 0.0 < largest < _UNMOVING or loss is None:
        return
    # Near its end a loss is small beside its gradient, as a square is beside what was squared; a
    # factor makes both small. The losses of classes end with both: only a fresh model is judged.
    is_scaled = 0.0 < walk.sent <= _MOST_BY_LOSS * abs(loss) and is_fresh(observation)
    if abs(loss) <= _LEARNT and not is_scaled:
        return
    # the first layer at whose output the gradient is usual
    usual = [r for r in called(observation) if (g := r.gradients) and g.abs_max >= _UNMOVING]
    culprit = next(iter(innermost(usual)), observation.layers[""])
    why = "the loss itself sends nothing back: a factor near zero, or it is flat so far out"
    if usual:
        given = culprit.inputs
        inputs = f" (inputs in [{given.min:.3g}, {given.max:.3g}])" if given else ""
        why = f"it is flat for its inputs{inputs}, or multiplied by next to nothing"
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
