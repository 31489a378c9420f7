"""Recurrences: states that are not carried on, and layers of which a part gets no gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pytest_modelhealth.checks.catalogue import CHECKS
from pytest_modelhealth.checks.check import Finding
from pytest_modelhealth.checks.facts import at, called, flow_of
from pytest_modelhealth.report import Flow, LayerRecord, Observation, Violation
from pytest_modelhealth.report.flow import Call, Vertex
from pytest_modelhealth.statistics import TensorStatistics

MISSING_GRADIENTS = CHECKS["missing_gradients"]
WIRING = CHECKS["wiring"]


_FEWEST_STEPS = 3
_SEQUENCES = 3
_SOURCES = frozenset({"constant", "parameter", "buffer"})
"""What a state is made of that no step made."""


def lost_states(observation: Observation, flow: Flow) -> Iterator[Violation]:
    """Yield what is called step by step, each time without a past, or without a part of it.

    Of layers that have no weights for a state of their own, those that are given a constant for it.
    """
    for record in observation.layers.values():
        if record.name not in flow or record.functional:
            continue
        calls = [call for call in flow.calls(record.name) if call.inputs]
        if len(calls) < _FEWEST_STEPS or len({call.parent for call in calls}) > 1:
            continue
        is_recurrent, line = _is_recurrent(record), calls[0].line
        if _starts_anew(flow, calls, is_recurrent):
            given = "a state that no step made" if calls[0].inputs[1:] else "no state"
            how = f"with {given}: nothing of what it returns comes back to it"
            cause = (
                "the state is not carried from step to step, so that nothing is remembered and "
                "the weights of the state learn nothing: assign what it returns and pass it on"
            )
        elif is_recurrent and _starts_partly_anew(flow, calls):
            line = calls[1].line
            how = (
                "and one of its states is the same constant each time, while another is carried on"
            )
            cause = (
                "one of the states that it returns is dropped (the cell state, as in `h, _ = "
                "cell(x, (h, c))`): assign both and pass both on"
            )
        else:
            continue
        yield WIRING.fault(
            record,
            f"it is called {len(calls)} times{at(line)}, once a step, {how}",
            value=float(len(calls)),
            cause=cause,
            independent=True,
            severity="fail" if is_recurrent else "warn",
        )


def _starts_anew(flow: Flow, calls: list[Call], is_recurrent: bool) -> bool:
    """Whether calls take one part of a sequence after the other, and nothing of each other."""
    states = {number for call in calls for number in call.inputs[1:]}
    if not _made_of(flow, *states) <= (_SOURCES if is_recurrent else {"constant"}):
        return False
    if not is_recurrent and not states:
        return False
    parts = {call.inputs[0] for call in calls}
    # the parts of what has no graph look alike
    kinds = {flow.graph.vertices[part].function for part in parts}
    if len(parts) < len(calls) and kinds != {"unbind"}:
        return False
    if len({flow.origins(part) for part in parts}) > 1:
        return False
    following = flow.after(*(output for call in calls for output in call.outputs))
    return all(following.isdisjoint(call.inputs) for call in calls)


def _starts_partly_anew(flow: Flow, calls: list[Call]) -> bool:
    """Whether each call but the first gets one state of the call before, and a constant for one."""
    later = [call.inputs[1:] for call in calls[1:]]
    if {len(states) for states in later} != {2}:
        return False
    after = [flow.after(*call.outputs) for call in calls[:-1]]
    carried = [
        all(states[at] in made for made, states in zip(after, later, strict=True)) for at in (0, 1)
    ]
    constant = [_made_of(flow, *(states[at] for states in later)) <= _SOURCES for at in (0, 1)]
    return any(carried) and any(constant)


def _made_of(flow: Flow, *numbers: int) -> set[str]:
    return {str(flow.graph.vertices[origin].kind) for origin in flow.origins(*numbers)}


def _is_recurrent(record: LayerRecord) -> bool:
    """Whether a layer has weights for its own state and takes one step at a time, as cells do."""
    shape = () if record.inputs is None else record.inputs.shape
    is_batch_first = record.options.get("batch_first")
    if not any(name.startswith("weight_hh") for name in record.parameters):
        return False
    return is_batch_first is None or (len(shape) == _SEQUENCES and shape[bool(is_batch_first)] == 1)


_INPUT, _STATE, _REVERSE = "weight_ih", "weight_hh", "_reverse"
_STEPS_TO_REMEMBER = 2
_PICKS = frozenset({"getitem", "select", "narrow", "slice", "unbind", "split", "chunk"})
_CHOOSES = frozenset({"gather", "index", "index_select", "take_along_dim", "masked_select"})


class Part(NamedTuple):
    """One direction of one layer of a recurrent stack.

    Args:
        suffix: how the names of its parameters end (``"_l0_reverse"``); ``""`` in a cell.
        inputs, states: the gradients of its weights of the inputs and of the state.
    """

    suffix: str
    inputs: TensorStatistics
    states: TensorStatistics

    @property
    def learns(self) -> bool:
        """Whether the weights of its inputs get a gradient."""
        return self.inputs.abs_max > 0.0

    @property
    def remembers(self) -> bool:
        """Whether the weights of its state do."""
        return self.states.abs_max > 0.0


def parts(record: LayerRecord) -> list[Part]:
    """Return the parts of a recurrent layer that can learn, all of whose gradients are finite."""
    found = []
    for name, inputs in record.parameter_gradients.items():
        if not name.startswith(_INPUT):
            continue
        suffix = name.removeprefix(_INPUT)
        states = record.parameter_gradients.get(_STATE + suffix)
        if states is None or {name, _STATE + suffix} & record.frozen:
            continue
        if inputs.nonfinite_count or states.nonfinite_count:
            return []
        found.append(Part(suffix, inputs, states))
    return found


def recurrent_gradients(observation: Observation) -> Iterator[Finding]:
    """Yield the recurrent layers of which a part learns nothing."""
    flow = flow_of(observation)
    for record in called(observation):
        found = parts(record)
        learning = [part for part in found if part.learns]
        if not learning:
            continue  # the whole layer is silent: that is told elsewhere
        # what picks from what it gives out, up to the next layers
        takers = flow.consumers(record.name) if record.name in flow else ()
        made = flow.operations(record.name, *takers) if takers else ()
        picks = [one for one in made if one.function in _PICKS | _CHOOSES]
        idle = [part for part in found if not (part.learns or part.remembers)]
        if idle:
            yield _unread(record, idle, learning, picks)
        steps = _steps(record, observation)
        forgetful = [part for part in learning if not part.remembers]
        if forgetful and steps is not None and steps >= _STEPS_TO_REMEMBER:
            yield _one_step(record, forgetful, found, steps, picks)


def _unread(
    record: LayerRecord,
    idle: list[Part],
    learning: list[Part],
    picks: list[Vertex],
) -> Finding:
    """Return that a layer of a stack is not read, or one direction of it."""
    level = {part.suffix.removesuffix(_REVERSE) for part in learning}
    is_direction = all(part.suffix.removesuffix(_REVERSE) in level for part in idle)
    line = next((one.line for one in picks if one.line), "")
    if is_direction:
        which = "reverse" if idle[0].suffix.endswith(_REVERSE) else "forward"
        cause = (
            f"of the last layer only one direction is read{at(line)}, and the {which} one is "
            "computed in vain: h_n[-1] is the reverse direction alone; join h_n[-2] and h_n[-1]"
        )
    else:
        cause = (
            f"the state of a lower layer is read{at(line)}, and the layers above it are computed "
            "in vain: h_n[0] is the first layer, h_n[-1] the last"
        )
    names = " and ".join(f"{_INPUT}{part.suffix}" for part in idle)
    return MISSING_GRADIENTS.fault(
        record,
        f"the gradients of its {names} are exactly zero, those of its other "
        f"{'direction' if is_direction else 'layers'} are not",
        tensor=f"{_INPUT}{idle[0].suffix}",
        cause=cause,
        severity="warn" if is_direction else "fail",
    )


def _one_step(
    record: LayerRecord,
    forgetful: list[Part],
    found: list[Part],
    steps: int,
    picks: list[Vertex],
) -> Finding:
    """Return that weights of a state get no gradient, since only a first step is read."""
    chosen = [one for one in picks if one.function in _CHOOSES or len(one.operands) > 1]
    names = " and ".join(f"{_STATE}{part.suffix}" for part in forgetful)
    text = (
        f"the gradient of its {names} is exactly zero over {steps} steps, that of the weights of "
        "its inputs is not"
    )
    if chosen:
        doubt = f"`{chosen[0].function}`{at(chosen[0].line)} may choose first steps on this batch"
        return MISSING_GRADIENTS.inconclusive(
            record, f"{text}, but {doubt} alone: give longer sequences"
        )
    line = next((one.line for one in picks if one.line), "")
    # the other direction of one of them remembers
    own = {part.suffix.removesuffix(_REVERSE) for part in forgetful}
    is_half = any(part.remembers and part.suffix.removesuffix(_REVERSE) in own for part in found)
    if is_half and forgetful[0].suffix.endswith(_REVERSE):
        cause = (
            f"the last step of the sequence is read{at(line)}, which the reverse direction comes "
            "to first: it has seen one step there; read h_n, or the reverse half at step 0"
        )
    else:
        cause = (
            f"only the first step is read{at(line)}, before anything is remembered: read the last "
            "one (out[:, -1] where the batch comes first), or all"
        )
    tensor, severity = f"{_STATE}{forgetful[0].suffix}", "warn" if is_half else "fail"
    return MISSING_GRADIENTS.fault(record, text, tensor=tensor, cause=cause, severity=severity)


def _steps(record: LayerRecord, observation: Observation) -> int | None:
    """Return of how many steps a sequence is; ``None`` where that does not show (packed ones).

    A cell takes one step a call, if it is given what it made of the step before.
    """
    if "batch_first" not in record.options:
        flow = flow_of(observation)
        calls = flow.calls(record.name) if record.name in flow else ()
        if len(calls) < _STEPS_TO_REMEMBER:
            return None
        is_carried = not flow.after(*calls[0].outputs).isdisjoint(calls[1].inputs)
        return len(calls) if is_carried else None
    shape = () if record.inputs is None else record.inputs.shape
    if len(shape) != _SEQUENCES:
        return None
    return shape[1 if record.options["batch_first"] else 0]
