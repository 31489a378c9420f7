"""The flow where none was recorded: by the order of calls, so that it says too much.

Deployed models, and layers that ran in threads of their own, show no graph. There a layer may
depend on all that ran before it; the notes of such a flow say so.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pytest_modelhealth.report.flow.flow import Flow
from pytest_modelhealth.report.flow.graph import Call, Graph, Kind, Vertex
from pytest_modelhealth.settings.setting import ancestors

if TYPE_CHECKING:
    from pytest_modelhealth.report import LayerRecord, Observation
    from pytest_modelhealth.statistics import TensorStatistics

NOTE = "inferred from the order of calls, as no flow was recorded: it says too much"


def with_flow(observation: Observation) -> Observation:
    """Return the observation with a flow of every layer that ran, inferred where none was seen."""
    ran = [r for r in observation.layers.values() if r.entered is not None]
    flow = observation.flow
    if flow is not None and all(record.name in flow for record in ran):
        return observation
    graph = _graph({r.name: r for r in ran}, has_loss=observation.loss is not None)
    return replace(observation, flow=Flow(lambda: graph))


def _graph(ran: dict[str, LayerRecord], *, has_loss: bool) -> Graph:
    """Return calls in their order, nested by their names; a layer called again has two."""
    vertices, calls = [Vertex(Kind.INPUT, "input 0")], list[Call]()
    so_far, stack = 0, list[int]()  # the vertex that all before may be in; the open calls
    moments = [(float(record.entered or 0), name) for name, record in ran.items()]
    moments += [(_returned(r), name) for name, r in ran.items() if r.calls > 1]
    for _, name in [*sorted(moments), (math.inf, None)]:
        path = [] if name is None else [*reversed([n for n in ancestors(name) if n in ran]), name]
        while stack and [calls[number].layer for number in stack] != path[: len(stack)]:
            number = stack.pop()
            call, last = calls[number], len(calls) - 1
            if last == number:
                record = ran[call.layer]
                live = record.gradients is not None or bool(record.parameter_gradients)
                live |= "gradients" not in record.watched
                cuts = frozenset(() if live else (0,))
                output = len(vertices)
                vertices.append(Vertex(Kind.CALL, call.layer, call.inputs, cuts, number, live))
                both = (so_far, output)
                vertices.append(
                    Vertex(Kind.OPERATION, "not seen", both, call=call.parent, live=True)
                )
                so_far = output + 1
            returned = output if last == number else so_far
            calls[number] = replace(call, last=last, outputs=(returned,))
        for layer in path[len(stack) :]:
            record, parent = ran[layer], stack[-1] if stack else -1
            stack.append(len(calls))
            calls.append(Call(layer, record.type_name, parent, len(calls), (so_far,)))
    outputs, loss = calls[0].outputs if calls else (), None
    if has_loss:
        loss = len(vertices)
        vertices.append(Vertex(Kind.OPERATION, "loss", outputs, live=True))
    return Graph(tuple(vertices), tuple(calls), outputs, loss, (NOTE,))


def _returned(record: LayerRecord) -> float:
    return math.inf if record.completed is None else record.completed


def same_values(a: TensorStatistics | None, b: TensorStatistics | None) -> bool:
    """Whether two tensors hold the same numbers, as far as their statistics tell."""
    if a is None or b is None or (a.count, a.finite_count) != (b.count, b.finite_count):
        return False
    if a.finite_count == 0:
        return a.shape == b.shape
    is_close = abs(a.mean - b.mean) <= 1e-9 * a.rms and abs(a.rms - b.rms) <= 1e-9 * a.rms
    # close: a reshape changes the order of summation
    return is_close and (a.min, a.max, a.zero_count) == (b.min, b.max, b.zero_count)
