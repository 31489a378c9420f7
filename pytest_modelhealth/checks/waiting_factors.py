"""Two factors of zero in different layers, each of which waits for the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks.check import ALWAYS, Check, Finding
from pytest_modelhealth.checks.facts import called, flow_of
from pytest_modelhealth.checks.freshness import seems_trained

if TYPE_CHECKING:
    from pytest_modelhealth.report import Flow, LayerRecord, Observation

_MATRIX = 2


def waiting_factors(check: type[Check], observation: Observation) -> Iterator[Finding]:
    """Yield layers of zeros that are given zeros, by rows of zeros that nothing else takes.

    Of ``up(down(x))`` the gradient of each is a product with the other. A gradient does come to
    what the second gives, so that no closed gate behind both explains it; and what the first gives
    is taken by this layer alone, so that none comes by another way. Where all of the first is zero,
    what it gives is the same for all samples, and other checks tell. A trained model may have been
    pruned.
    """
    if seems_trained(observation):
        return
    for record in called(observation):
        if not _is_still(record):
            continue
        maker = _maker(record, observation)
        if maker is None or not _has_rows_of_zeros(maker, record):
            continue
        yield check.violation(
            record,
            "its weight is zero, is given zeros alone, and gets a gradient of exactly zero",
            value=0.0,
            limit=ALWAYS,
            tensor="weight",
            cause=f"the rows of {maker.label!r} that it takes are zero, too: each gets its "
            "gradient through the other, so that both stay zero; initialise one at random",
            affected=(maker.name,),
        )


def _is_still(record: LayerRecord) -> bool:
    weight, gradient = record.parameters.get("weight"), record.parameter_gradients.get("weight")
    given, arrived = record.inputs, record.gradients
    if weight is None or gradient is None or given is None or arrived is None:
        return False
    if "weight" in record.frozen or len(weight.shape) < _MATRIX or not given.count:
        return False
    is_zero = weight.abs_max == gradient.abs_max == given.abs_max == 0.0
    return is_zero and arrived.abs_max > 0.0


def _maker(record: LayerRecord, observation: Observation) -> LayerRecord | None:
    """Return the layer of which this one takes a part that no other layer or operation takes."""
    from pytest_modelhealth.report.flow import AS_IT_IS

    flow = flow_of(observation)
    if not flow.is_exact or record.name not in flow or len(flow.calls(record.name)) != 1:
        return None
    vertices = flow.graph.vertices
    (call,) = flow.calls(record.name)
    if len(call.inputs) != 1:
        return None
    (number,) = call.inputs
    is_alone = _takers(flow, number) == 1
    while is_alone and vertices[number].kind == "operation":
        vertex = vertices[number]
        if vertex.function not in AS_IT_IS or len(vertex.operands) != 1:
            return None
        (number,) = vertex.operands
    made = vertices[number]
    return observation.layers.get(made.name) if is_alone and made.kind == "call" else None


def _takers(flow: Flow, number: int) -> int:
    """Return in how many places a vertex is taken."""
    taken = sum(vertex.operands.count(number) for vertex in flow.graph.vertices)
    return taken + flow.graph.outputs.count(number)


def _has_rows_of_zeros(maker: LayerRecord, taker: LayerRecord) -> bool:
    """Whether weights of a layer are zero in as many rows as another takes, and not in all."""
    weight, wanted = maker.parameters.get("weight"), taker.parameters["weight"]
    if weight is None or len(weight.shape) < _MATRIX or "weight" in maker.frozen:
        return False
    zeros = round(weight.zero_fraction * weight.count)
    return wanted.shape[1] * (weight.count // weight.shape[0]) <= zeros < weight.count
