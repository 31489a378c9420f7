"""Recurrences: states that are not carried on, and layers of which a part gets no gradient."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.facts import at, called, flow_of
from pytest_modelhealth.report import Finding, Flow, LayerRecord, Observation
from pytest_modelhealth.report.flow import Call

MISSING_GRADIENTS = CHECKS["missing_gradients"]
WIRING = CHECKS["wiring"]


_FEWEST_STEPS = 3
_SEQUENCES = 3
_SOURCES = frozenset({"constant", "parameter", "buffer"})
"""What a state is made of that no step made."""


def lost_states(observation: Observation, flow: Flow) -> Iterator[Finding]:
    """Yield cells that are called step by step, each time without a past, or a part of it."""
    for record in observation.layers.values():
        calls = flow.calls(record.name) if _is_recurrent(record) and record.name in flow else ()
        if len(calls) < _FEWEST_STEPS or len({call.parent for call in calls}) > 1:
            continue
        if how := _how_states_are_lost(flow, calls):
            yield WIRING.fault(
                record,
                f"it is called {len(calls)} times{at(calls[1].line)}, once a step, with {how}",
                value=float(len(calls)),
                cause="a state is not carried from step to step, so that nothing is remembered and "
                "the weights of the state learn nothing: assign all that it returns (not `h, _ = "
                "cell(x, (h, c))`) and pass it on",
                independent=True,
            )


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


_INPUT, _STATE, _REVERSE = "weight_ih", "weight_hh", "_reverse"


def recurrent_gradients(observation: Observation) -> Iterator[Finding]:
    """Yield the recurrent layers of which a part learns nothing, or remembers nothing.

    A part is a direction of one layer of a stack. A direction may be left out on purpose, and the
    batch may choose first steps alone. Of a layer that is silent as a whole others tell.
    """
    flow = flow_of(observation)
    for record in called(observation):
        gradients = record.parameter_gradients.items()
        seen = {name: g.abs_max > 0.0 for name, g in gradients if name not in record.frozen}
        parts = [name.removeprefix(_INPUT) for name in seen if name.startswith(_INPUT)]
        parts = [part for part in parts if _STATE + part in seen]
        learning = [part for part in parts if seen[_INPUT + part]]
        if not learning:
            continue
        steps = _steps(record, flow)
        takers = flow.consumers(record.name) if record.name in flow else ()
        made = flow.operations(record.name, *takers) if takers else ()
        line = at(next((o.line for o in made if o.has("slice", "index") and o.line), ""))
        levels = {part.removesuffix(_REVERSE) for part in learning if seen[_STATE + part]}
        idle = [part for part in parts if part not in learning]
        forgetful = [part for part in learning if not seen[_STATE + part] and steps > 1]
        for tensor, silent, over, cause in (
            (_INPUT, idle, "", f"the state of a lower layer is read{line}, and {_LOWER}"),
            (
                _STATE,
                forgetful,
                f" over {steps} steps",
                f"only the first step is read{line}{_FIRST}",
            ),
        ):
            is_half = any(part.removesuffix(_REVERSE) in levels for part in silent)
            is_chosen = tensor == _STATE and any(o.has("index") for o in made)
            if silent:
                yield MISSING_GRADIENTS.fault(
                    record,
                    f"the gradient of its {' and '.join(tensor + part for part in silent)} is "
                    f"exactly zero{over}, that of others is not",
                    tensor=tensor + silent[0],
                    cause=f"one direction is read{line}, or {_HALF}" if is_half else cause,
                    severity="warn" if is_half or is_chosen else "fail",
                )


_LOWER = "those above it are computed in vain: h_n[0] is the first layer, h_n[-1] the last"
_FIRST = ": read the last one (out[:, -1]), or all"
_HALF = (
    "one end of the sequence, where the other direction has seen one step: join h_n[-2] and h_n[-1]"
)


def _steps(record: LayerRecord, flow: Flow) -> int:
    """Return of how many steps a sequence is; 0 where that does not show (packed ones).

    A cell takes one step a call, if it is given what it made of the step before.
    """
    if "batch_first" not in record.options:
        calls = flow.calls(record.name) if record.name in flow else ()
        made = flow.after(*calls[0].outputs) if len(calls) > 1 else frozenset[int]()
        return 0 if made.isdisjoint(calls[1].inputs if made else ()) else len(calls)
    shape = () if record.inputs is None else record.inputs.shape
    return shape[bool(record.options["batch_first"])] if len(shape) == _SEQUENCES else 0
