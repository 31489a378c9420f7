"""Chains that take a part of the gradient, and gradients that no optimizer can use."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.facts import (
    called,
    completed,
    flow_of,
    innermost,
    is_fresh,
    largest_at,
    linear_maps,
    seems_trained,
)
from pytest_modelhealth.checks.paths import EDGED, QUOTIENTS, first_of, named, way_to
from pytest_modelhealth.report import LayerRecord, Observation, Violation
from pytest_modelhealth.settings import Settings

GRAD_NORM = CHECKS["grad_norm"]


STEEPEST = {"sigmoid": 0.25, "hardsigmoid": 1 / 6}
"""The largest slope of those that shrink a gradient wherever their inputs lie."""

BOUNDED = frozenset({"tanh", "softsign", "hardtanh", "logsigmoid", *STEEPEST})
FEWEST_GAINS = 4
MOST_LEFT = 1e-3
"""What a chain leaves of a gradient, at most, to be told: AutoTrainer's first layer by its last."""

_LONGEST_STEP = 8
_PASSED = frozenset(
    {"avg_pool1d", "avg_pool2d", "dropout", "flatten", "max_pool1d", "max_pool2d", "permute"}
    | {"reshape", "squeeze", "transpose", "unsqueeze", "view"}
)


class Chain(NamedTuple):
    """Layers with weights, one after the other, with a bounded activation between any two.

    Args:
        layers: those that the gradient shrinks between, in order of the forward.
        activations: the names of the functions between them, each once.
        left: what is left of the gradient at the output of the last one at that of the first.
    """

    layers: tuple[LayerRecord, ...]
    activations: tuple[str, ...]
    left: float

    @property
    def factor(self) -> float:
        """By how much the gradient shrinks from a layer to the one before, on average."""
        return math.exp(-math.log(self.left) / (len(self.layers) - 1))


def contracting_chains(observation: Observation) -> list[Chain]:
    """Return the chains along which bounded activations leave under a thousandth of the gradient.

    The last layer of a chain is left out: what it makes of the gradient depends on the number of
    outputs. Each of the others, four or more, gives a smaller gradient back than it gets; sums,
    products with gates and normalisations end a chain.
    """
    bounded = (r.calls for r in observation.layers.values() if r.activation in BOUNDED)
    if sum(bounded) < FEWEST_GAINS:
        return []
    weighted = (r for r in observation.layers.values() if linear_maps(r))
    steps = {record.name: _step_before(observation, record) for record in weighted}
    before = {name: step for name, step in steps.items() if step is not None}
    taken = {step[0].name for step in before.values()}
    chains = (_chain(before, name) for name in before if name not in taken)
    return [chain for chain in chains if chain is not None]


def _chain(before: dict[str, tuple[LayerRecord, str]], last: str) -> Chain | None:
    record, kinds = before[last][0], dict[str, None]()
    layers = [record]
    while record.name in before:
        previous, kind = before[record.name]
        if previous in layers or not _gain(previous, record) < 1.0:
            break
        layers.append(previous)
        kinds[kind] = None
        record = previous
    if len(layers) <= FEWEST_GAINS:
        return None
    left = _gain(layers[-1], layers[0])
    return Chain(tuple(layers[::-1]), tuple(kinds), left) if 0.0 < left < MOST_LEFT else None


def _gain(before: LayerRecord, record: LayerRecord) -> float:
    """Return how the gradient at the output of `before` compares with that of `record`."""
    one, other = before.gradients, record.gradients
    if one is None or other is None or one.nonfinite_count or not other.rms > 0.0:
        return math.inf
    return one.rms / other.rms


def _step_before(observation: Observation, record: LayerRecord) -> tuple[LayerRecord, str] | None:
    """Return the layer with weights before one, and the bounded activation between the two.

    It is asked of vertices, since one activation may be called between any two layers.
    """
    flow, kind = flow_of(observation), ""
    calls = flow.calls(record.name) if record.name in flow else ()
    if len(calls) != 1 or len(calls[0].inputs) != 1:
        return None
    vertex = flow.graph.vertices[calls[0].inputs[0]]
    for _ in range(_LONGEST_STEP):
        found = observation.layers.get(vertex.name) if vertex.kind == "call" else None
        if found is not None and linear_maps(found):
            return (found, kind) if kind else None
        if found is None:  # a pooling, a layout
            is_passed = vertex.kind == "operation" and vertex.function in _PASSED
        else:
            has_state = bool(found.parameters or found.buffers)
            is_plain = found.activation is None and not has_state
            is_passed = is_plain or found.activation in BOUNDED
        if len(vertex.operands) != 1 or not is_passed:
            return None
        if found is not None and found.activation in BOUNDED:
            kind = kind or str(found.activation)
        vertex = flow.graph.vertices[vertex.operands[0]]
    return None


# ---- singular derivatives -----------------------------------------------------------------------

_LEAST_JUMP = 1e3


def singular(
    records: list[LayerRecord],
    observation: Observation,
    settings: Settings,
    near: Callable[[], Mapping[str, tuple[float, str]]],
    exploding: list[Violation],
) -> Iterator[Violation]:
    """Yield where a gradient begins that is singular.

    Where no root, norm or quotient is seen to make it, what else explodes is said instead.
    """
    over = [
        record
        for record in records
        if gradient_norm(record, observation)
        > settings.limit("singular_grad_norm", record.name).value
    ]
    if not over:
        yield from exploding
        return
    last = max(over, key=completed)
    way = [observation.layers[name] for name in way_to(last.name, near())[::-1]]
    # where it jumps first on the way back; where gradients come in large, the loss makes them so
    flow, way = flow_of(observation), way or [last]
    sizes = [0.0 if r.gradients is None else r.gradients.rms for r in way]
    jumps = [n for n in range(len(way) - 1) if sizes[n] > _LEAST_JUMP * sizes[n + 1] > 0.0]
    culprit = way[jumps[-1]] if jumps else None
    ends = [way[-1].name, "output", "loss"]
    if culprit is not None:
        ends = [culprit.name, way[jumps[-1] + 1].name]
    risky = first_of([v for v in flow.operations(*ends) if v.live], EDGED, QUOTIENTS)
    if not risky and exploding:
        yield from exploding
        return
    norm = gradient_norm(last, observation)
    limit = settings.limit("singular_grad_norm", last.name)
    yield GRAD_NORM.violation(
        last if culprit is None else culprit,
        f"the gradient norm of {last.label!r} is {norm:.3g}, over {limit.value:g}: a derivative on "
        "the way back is all but infinite",
        value=norm,
        limit=limit,
        cause=f"the backward of {named(risky)}: its derivative has no end where it is near zero; "
        "add an epsilon inside a root or norm, or to a denominator"
        if risky
        else "the derivative of a root, norm, logarithm or quotient near zero, or losses and "
        "weights that are far too large",
        affected=[r.name for r in over if r is not culprit],
        details=largest_at(last, "gradients"),
    )


def gradient_norm(record: LayerRecord, observation: Observation) -> float:
    """Return the L2 norm of the gradients of a layer's own parameters.

    Over several batches it is the root mean square of theirs.
    """
    gradients = record.parameter_gradients.values()
    return math.sqrt(math.fsum(s.norm**2 for s in gradients) / observation.batches)


# ---- gradients that move nothing ----------------------------------------------------------------

_NEXT_TO_ZERO = 1e-4
"""A loss below this may be learnt: its gradients are as small with nothing wrong."""
_MOST_BY_LOSS = 10.0
_SINGLE = ("float32", "bfloat16", "float16")


def unmoving(
    records: list[LayerRecord], observation: Observation, settings: Settings
) -> Iterator[Violation]:
    """Yield that every gradient is too small to move a parameter.

    In float64 a fit may end so: it is only warned of there.
    """
    gradients = [s for record in records for s in record.parameter_gradients.values()]
    largest = max((s.abs_max for s in gradients), default=0.0)
    limit, loss = settings["min_largest_gradient"], observation.loss
    if not 0.0 < largest < limit.value or loss is None:
        return
    # Near its end a loss is small beside its gradient, as a square is beside what was squared; a
    # factor makes both small. The losses of classes end with both: only a fresh model is judged.
    sent = observation.layers[""].gradients
    is_scaled = sent is not None and 0.0 < sent.norm <= _MOST_BY_LOSS * abs(loss)
    is_fresh_alone = is_fresh(observation) and not seems_trained(observation)
    if abs(loss) <= _NEXT_TO_ZERO and not (is_scaled and is_fresh_alone):
        return
    # the last layer at whose output the gradient is usual, and why it is not before
    culprit = observation.layers[""]
    why = "the loss itself sends nothing back: a factor near zero, or an output so far out that it "
    why += "is flat there"
    if sent is not None and sent.abs_max >= limit.value:
        for record in sorted(innermost(called(observation)), key=completed, reverse=True):
            if record.gradients is not None and record.gradients.count:
                if record.gradients.abs_max < limit.value:
                    break
                culprit = record
        given = culprit.inputs
        inputs = f" (inputs in [{given.min:.3g}, {given.max:.3g}])" if given else ""
        why = (
            f"what comes back through {culprit.label!r} is lost: it is flat for its inputs"
            f"{inputs}, or multiplied by next to nothing"
        )
    is_single = any(s.dtype in _SINGLE for s in gradients)
    yield GRAD_NORM.violation(
        culprit,
        f"the largest number in all gradients is {largest:.3g} while the loss is {loss:.3g}: no "
        "optimizer moves a parameter by it",
        value=largest,
        limit=limit,
        role="gradients",
        cause=why,
        affected=[r.name for r in records if r is not culprit],
        severity="fail" if is_single else "warn",
    )
