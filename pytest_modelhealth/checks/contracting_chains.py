"""Chains of bounded activations, each of which takes a part of the gradient."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from pytest_modelhealth.checks.facts import flow_of
from pytest_modelhealth.checks.weights import linear_maps

if TYPE_CHECKING:
    from pytest_modelhealth.report import LayerRecord, Observation
    from pytest_modelhealth.report.flow import Vertex

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
    before = {}
    for record in observation.layers.values():
        step = _step_before(observation, record) if linear_maps(record) else None
        if step is not None:
            before[record.name] = step
    taken = {step[0].name for step in before.values()}
    chains = []
    for name in before:
        if name in taken:
            continue
        chain = _chain(before, name)
        if chain is not None:
            chains.append(chain)
    return chains


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
        if len(vertex.operands) != 1 or not _is_passed(vertex, found):
            return None
        if found is not None and found.activation in BOUNDED:
            kind = kind or str(found.activation)
        vertex = flow.graph.vertices[vertex.operands[0]]
    return None


def _is_passed(vertex: Vertex, record: LayerRecord | None) -> bool:
    """Whether a chain goes on through a vertex: a bounded activation, a pooling, a layout."""
    if record is None:
        return vertex.kind == "operation" and vertex.function in _PASSED
    is_plain = record.activation is None and not (record.parameters or record.buffers)
    return is_plain or record.activation in BOUNDED
