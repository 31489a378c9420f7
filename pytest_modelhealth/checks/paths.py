"""Ways along the flow: to the next weights, and between layers that something is added to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pytest_modelhealth.checks.facts import at, flow_of, linear_maps
from pytest_modelhealth.operations import having, name_of
from pytest_modelhealth.report import LayerRecord, Observation, Vertex
from pytest_modelhealth.report.flow import By
from pytest_modelhealth.statistics import TensorStatistics

EDGED, QUOTIENTS, POWERS = having("edge"), having("quotient"), having("power")
_OVERFLOWING = having("product", "matrix", "total")
BREAKING = (EDGED | QUOTIENTS, POWERS, _OVERFLOWING)
"""What makes of numbers what is no number, the likeliest first."""
UNDERIVABLE = (EDGED, QUOTIENTS, POWERS)
"""What makes of a gradient what is no number, the likeliest first."""


def first_of(operations: Sequence[Vertex], *kinds: frozenset[str]) -> list[Vertex]:
    """Return the operations of the first of `kinds` of which there are any.

    A quotient by a number, which is no operand, is a product.
    """
    functions = {
        o: "mul" if name_of(o.function) == "div" and len(o.operands) == 1 else o.function
        for o in operations
    }
    found = ([o for o in operations if functions[o] in kind] for kind in kinds)
    return next(filter(None, found), [])


def named(operations: Sequence[Vertex], joint: str = " or ", most: int = 2) -> str:
    """Return what operations are called, the first few, each with its line."""
    lines = (f"`{o.function}`{at(o.line)}" for o in operations)
    return joint.join(list(dict.fromkeys(lines))[:most])


HAS_WEIGHTS = frozenset({"in_features", "in_channels", "input_size"})
"""Options of layers whose weights may be tied, so that another layer lists them."""


def way_to_weights(observation: Observation, record: LayerRecord) -> list[LayerRecord]:
    """Return the layers from `record` to the next weights, those last, ``[]`` where none follow.

    Only layers that take the output before them as it is, or a constant added to it, are on it: a
    sum with a residual stream, a product with a gate, a concatenation end the way, so that it is
    empty for zero-initialised branches, gates and heads.
    """
    way: list[LayerRecord] = []
    here = record
    while True:
        following = [taker for taker in _takers(observation, here) if taker not in way]
        if not following:
            return []
        here = following[0]
        way.append(here)
        if here.activation in having("softmax"):
            return []
        if linear_maps(here) or not HAS_WEIGHTS.isdisjoint(here.options):
            return way


def nearest(
    observation: Observation, numbers: Mapping[str, float], *, back: bool = False, by: By = "value"
) -> dict[str, tuple[float, str]]:
    """Return which of the layers with a number, next before each layer, has the largest."""
    own = {name: ((number, name),) for name, number in numbers.items()}

    def pass_on(layer: str, came: _Two | None) -> _Two | None:
        return own.get(layer, came)

    def join(a: _Two, b: _Two) -> _Two:
        return tuple(sorted({*a, *b}, reverse=True)[:2])

    came = flow_of(observation).sweep(pass_on, join, back=back, by=by)
    others = {layer: [two for two in best if two[1] != layer] for layer, best in came.items()}
    return {layer: found[0] for layer, found in others.items() if found}


_Two = tuple[tuple[float, str], ...]
"""The largest and the next, as a layer that is called again comes before itself."""


def way_to(layer: str, near: Mapping[str, tuple[float, str]]) -> list[str]:
    """Return the layers that are `nearest` to each other on the way to `layer`, itself last."""
    way = {layer: None}
    while layer in near and near[layer][1] not in way:
        layer = near[layer][1]
        way[layer] = None
    return list(way)[::-1]


def factors(observation: Observation, sources: Iterable[str], target: str) -> str:
    """Return which operations between layers may change the scale, in brackets, if any do."""
    flow = flow_of(observation)
    made = (vertex for source in sources for vertex in flow.operations(source, target))
    scaling = [
        vertex
        for vertex in made
        if vertex.function in QUOTIENTS | POWERS | _OVERFLOWING and vertex.line
    ]
    return f" ({named(scaling, ', ', most=3)})" if scaling else ""


def as_given(observation: Observation, name: str) -> TensorStatistics | None:
    """Return the statistics of a tensor of the batch, where it is the only one or a layer's own."""
    flow, root = flow_of(observation), observation.layers.get("")
    if len(flow.inputs) == 1:
        return None if root is None else root.inputs
    for taker in flow.consumers(name, as_it_is=True):
        record = observation.layers.get(taker)
        if record is not None and all(len(set(call.inputs)) == 1 for call in flow.calls(taker)):
            return record.inputs
    return None


def is_floating(statistics: TensorStatistics) -> bool:
    """Whether these are numbers rather than ids or masks."""
    return statistics.dtype.startswith(("float", "bfloat"))


def normalizer(observation: Observation, record: LayerRecord) -> LayerRecord | None:
    """Return the normalisation that takes the output of `record` as it is, if one does.

    The scale of that output changes nothing of what comes after.
    """
    taker = next(_takers(observation, record), None)
    return taker if taker is not None and is_normalization(taker) else None


def maker(observation: Observation, record: LayerRecord) -> LayerRecord | None:
    """Return the layer whose output `record` is called with as it is, if there is one."""
    flow = flow_of(observation)
    names = flow.producers(record.name, as_it_is=True) if record.name in flow else ()
    return next((observation.layers[name] for name in names if name in observation.layers), None)


def held_by(before: LayerRecord | None, given: TensorStatistics) -> str:
    """Say what holds the outputs of a layer far from zero: its bias, or its inputs, if one does."""
    bias = None if before is None else before.parameters.get("bias")
    if before is None or before.inputs is None:
        return "what is computed before it is far off: weights, inputs, an offset or a scale"
    if bias is not None and bias.abs_max >= 0.5 * given.abs_max:
        return f"the bias of {before.label!r} (mean {bias.mean:.3g}) holds them there"
    if before.inputs.rms > _LARGE_INPUTS:
        return f"the inputs of {before.label!r} are large (rms {before.inputs.rms:.3g}): normalise"
    return ""


_LARGE_INPUTS = 10.0


def is_normalization(record: LayerRecord) -> bool:
    """Whether a layer normalises: one of torch's, one with running statistics, or by its numbers.

    Those of other libraries have a scale or an epsilon of their own, and give out what these make
    of values of variance 1, however large what comes in.
    """
    if record.type_name in having("normalization") or "running_var" in record.buffers:
        return True
    given, returned = record.inputs, record.activations
    if given is None or returned is None or record.activation is not None:
        return False
    if linear_maps(record) or not (record.parameters or "eps" in record.options):
        return False
    scale = record.parameters.get("weight")
    shift = record.parameters.get("bias")
    usual = math.hypot(
        1.0 if scale is None or not scale.finite_count else scale.rms,
        0.0 if shift is None or not shift.finite_count else shift.rms,
    )
    return given.rms > _FAR * usual and returned.rms <= _NEAR * usual


_FAR, _NEAR = 3.0, 1.5


def _takers(observation: Observation, record: LayerRecord) -> Iterator[LayerRecord]:
    """Yield the layers that take what `record` gives, or its sum with a constant, in order."""
    for name in flow_of(observation).consumers(record.name, shifted=True):
        if name in observation.layers:
            yield observation.layers[name]
