"""Recurrences: of how many steps they are, and states that are not carried on."""

from __future__ import annotations

from collections.abc import Sequence

from pytest_modelhealth.checks.axes import Faults, Run
from pytest_modelhealth.checks.facts import at
from pytest_modelhealth.report import Flow, LayerRecord
from pytest_modelhealth.report.flow import Call

_FEWEST_STEPS = 3
_SEQUENCES = 3
_SOURCES = frozenset({"constant", "parameter", "buffer"})
"""What a state is made of that no step made."""


def lost_states(run: Run) -> Faults:
    """Yield cells that are called step by step, each time without a past, or a part of it."""
    for record in run.layers.values():
        is_cell = _is_recurrent(record) and record.name in run.flow
        calls = run.flow.calls(record.name) if is_cell else ()
        if len(calls) < _FEWEST_STEPS or len({call.parent for call in calls}) > 1:
            continue
        if how := _how_states_are_lost(run.flow, calls):
            what = f"it is called {len(calls)} times{at(calls[1].line)}, once a step, with {how}"
            cause = "a state is not carried from step to step, so that nothing is remembered and "
            cause += "the weights of the state learn nothing: assign all that it returns (not "
            cause += "`h, _ = cell(x, (h, c))`) and pass it on"
            yield (record.name,), what, cause, "fail"


def one_state(run: Run) -> Faults:
    """Yield LSTMs that are given a hidden state that one has made as their cell, too.

    A tensor that is given twice is told once: of two, the first may be a state and the input.
    """
    told = dict(run.having("is_one_state"))
    for number, vertex in told.items():
        before = (run.before(operand, "view", "index", "join") for operand in vertex.operands)
        given, *states = ({told[n].name for n in met if n in told} for met in before)
        makers = set[str]().union(*states)
        if vertex.facts["is_one_state"] == (True,) and makers and not (given and len(states) == 1):
            what = "it is given a hidden state as its cell, too: the two are equal throughout"
            cause = "`(h, h)`, or a copied line, where `(h, c)` was meant: the cell's is lost"
            yield number, what, cause, "fail" if vertex.name in makers else "warn"


def _how_states_are_lost(flow: Flow, calls: Sequence[Call]) -> str:
    """Return which states are constants in calls that take one part of a sequence each."""
    parts, vertices = {call.inputs[0] for call in calls}, flow.graph.vertices
    # the parts of what has no graph look alike
    if len(parts) < len(calls) and {vertices[part].function for part in parts} != {"unbind"}:
        return ""
    states = [*zip(*(call.inputs[1:] for call in calls[1:]), strict=False)]
    made = [flow.after(*call.outputs) for call in calls[:-1]]
    carried = [all(n in after for n, after in zip(one, made, strict=True)) for one in states]
    constant = [
        {str(vertices[origin].kind) for origin in flow.origins(*one)} <= _SOURCES for one in states
    ]
    if any(carried) and any(constant):
        return "one of its states the same constant each time, while another is carried on"
    after = frozenset[int]().union(*made)
    if all(constant) and all(after.isdisjoint(call.inputs) for call in calls):
        return "a state that no step made: nothing of what it returns comes back to it"
    return ""


def _is_recurrent(record: LayerRecord) -> bool:
    """Whether a layer has weights for its own state and takes one step at a time, as cells do."""
    if not any(name.startswith("weight_hh") for name in record.parameters):
        return False
    shape = () if record.inputs is None else record.inputs.shape
    is_batch_first = record.options.get("batch_first")
    return is_batch_first is None or (len(shape) == _SEQUENCES and shape[bool(is_batch_first)] == 1)


def steps_of(record: LayerRecord, flow: Flow) -> int:
    """Return of how many steps a sequence is; 0 where that does not show (packed ones).

    A cell takes one step a call, if it is given what it made of the step before.
    """
    if "batch_first" not in record.options:
        calls = flow.calls(record.name) if record.name in flow else ()
        made = flow.after(*calls[0].outputs) if len(calls) > 1 else frozenset[int]()
        return 0 if made.isdisjoint(calls[1].inputs if made else ()) else len(calls)
    shape = () if record.inputs is None else record.inputs.shape
    return shape[bool(record.options["batch_first"])] if len(shape) == _SEQUENCES else 0
