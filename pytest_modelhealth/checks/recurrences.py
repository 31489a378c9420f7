"""States that are not carried from step to step, in cells of torch and in those made by hand."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks.check import ALWAYS, Check
from pytest_modelhealth.checks.facts import at
from pytest_modelhealth.checks.paths import as_given
from pytest_modelhealth.settings.layer_names import is_inside

if TYPE_CHECKING:
    from pytest_modelhealth.report import Flow, LayerRecord, Observation, Violation
    from pytest_modelhealth.report.flow import Call, Vertex
    from pytest_modelhealth.settings import Severity

_FEWEST_STEPS = 3
_SEQUENCES = 3
_SOURCES = frozenset({"constant", "parameter", "buffer"})
"""What a state is made of that no step made."""
_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})
_JOINS = frozenset({"cat", "concat", "concatenate", "hstack"})

Steps = list[tuple[tuple[int, ...], tuple[int, ...]]]
"""What each call is given: of the sequence, and as a state."""


def lost_states(observation: Observation, flow: Flow, check: type[Check]) -> Iterator[Violation]:
    """Yield what is called step by step, each time without a past, or without a part of it.

    Of layers that have no weights for a state of their own, those that are given a constant for it.
    """
    by_hand: dict[frozenset[int], list[tuple[LayerRecord, list[Call]]]] = {}
    for record in observation.layers.values():
        if record.name not in flow or record.functional:
            continue
        calls = [call for call in flow.calls(record.name) if call.inputs]
        if len(calls) < _FEWEST_STEPS or len({call.parent for call in calls}) > 1:
            continue
        is_recurrent = _is_recurrent(record)
        steps: Steps = [(call.inputs[:1], call.inputs[1:]) for call in calls]
        if _starts_anew(flow, calls, steps, is_recurrent):
            given = "a state that no step made" if calls[0].inputs[1:] else "no state"
            severity: Severity = "fail" if is_recurrent else "warn"
            yield _never_carried(check, record, calls, given, severity)
        elif is_recurrent and _starts_partly_anew(flow, calls):
            yield _half_carried(check, record, calls)
        elif zeros := _zeros_joined(observation, flow, record, calls):
            by_hand.setdefault(zeros, []).append((record, calls))
    for found in by_hand.values():
        record, calls = found[0]
        inner = [r.name for r, _ in found[1:] if not is_inside(r.name, record.name)]
        given = "zeros joined to the step as its state"
        yield _never_carried(check, record, calls, given, "warn", inner)


def _never_carried(
    check: type[Check],
    record: LayerRecord,
    calls: list[Call],
    given: str,
    severity: Severity,
    affected: Collection[str] = (),
) -> Violation:
    return check.violation(
        record,
        f"it is called {len(calls)} times{at(calls[0].line)}, once a step, with {given}: "
        "nothing of what it returns comes back to it",
        value=float(len(calls)),
        limit=ALWAYS,
        cause="the state is not carried from step to step, so that nothing is remembered and "
        "the weights of the state learn nothing: assign what it returns and pass it on",
        independent=True,
        affected=affected,
        severity=severity,
    )


def _half_carried(check: type[Check], record: LayerRecord, calls: list[Call]) -> Violation:
    return check.violation(
        record,
        f"it is called {len(calls)} times{at(calls[1].line)}, once a step, and one of its states "
        "is the same constant each time, while another is carried on",
        value=float(len(calls)),
        limit=ALWAYS,
        cause="one of the states that it returns is dropped (the cell state, as in `h, _ = "
        "cell(x, (h, c))`): assign both and pass both on",
        independent=True,
    )


def _starts_anew(flow: Flow, calls: list[Call], steps: Steps, is_recurrent: bool) -> bool:
    """Whether calls take one part of a sequence after the other, and nothing of each other."""
    states = {number for _, given in steps for number in given}
    if not _made_of(flow, *states) <= (_SOURCES if is_recurrent else {"constant"}):
        return False
    if not is_recurrent and not states:
        return False
    parts = {step for step, _ in steps}
    # the parts of what has no graph look alike
    kinds = {flow.graph.vertices[number].function for part in parts for number in part}
    if len(parts) < len(calls) and kinds != {"unbind"}:
        return False
    if len({flow.origins(*part) for part in parts}) > 1:
        return False
    following = flow.after(*(output for call in calls for output in call.outputs))
    return all(following.isdisjoint(call.inputs) for call in calls)


def _starts_partly_anew(flow: Flow, calls: list[Call]) -> bool:
    """Whether each call but the first gets one state of the call before, and a constant for one."""
    later = [call.inputs[1:] for call in calls[1:]]
    if {len(states) for states in later} != {2}:
        return False
    carried = [
        all(
            states[place] in flow.after(*before.outputs)
            for before, states in zip(calls, later, strict=False)
        )
        for place in range(2)
    ]
    constant = [_made_of(flow, *(s[place] for s in later)) <= _SOURCES for place in range(2)]
    return any(carried) and any(constant)


def _zeros_joined(
    observation: Observation, flow: Flow, record: LayerRecord, calls: list[Call]
) -> frozenset[int]:
    """Return the zeros that a linear layer is given beside each step, if that begins anew.

    Zeros that make a sequence longer leave its width as it is, and those beside a sample are no
    state.
    """
    width = record.options.get("in_features")
    if not isinstance(width, int) or len(calls) * observation.batches == observation.samples:
        return frozenset()
    steps = [_split(flow, call) for call in calls]
    if not all(step and zeros for step, zeros in steps):
        return frozenset()
    widths = {_width(observation, flow.graph.vertices[n]) for n in flow.origins(*steps[0][0])}
    is_wider = None not in widths and width not in widths
    if not is_wider or not _starts_anew(flow, calls, steps, is_recurrent=False):
        return frozenset()
    return frozenset(number for _, zeros in steps for number in zeros)


def _split(flow: Flow, call: Call) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what is joined to make the input of a call: what is no zeros, and what is."""
    vertices = flow.graph.vertices
    joined = vertices[call.inputs[0]]
    operands = joined.operands if joined.function in _JOINS else ()
    zeros = tuple(n for n in operands if _is_zeros(flow, n))
    return tuple(n for n in operands if n not in zeros), zeros


def _is_zeros(flow: Flow, number: int) -> bool:
    made = [flow.graph.vertices[origin] for origin in flow.origins(number)]
    return bool(made) and all(one.kind == "constant" and one.name in _ZEROS for one in made)


def _width(observation: Observation, origin: Vertex) -> int | None:
    """Return the size of the last dimension of what a layer returned, or of an input."""
    if origin.kind == "input":
        found = as_given(observation, origin.name)
    else:
        record = observation.layers.get(origin.name)
        found = None if record is None else record.activations
    return found.shape[-1] if found is not None and found.shape else None


def _made_of(flow: Flow, *numbers: int) -> set[str]:
    return {str(flow.graph.vertices[origin].kind) for origin in flow.origins(*numbers)}


def _is_recurrent(record: LayerRecord) -> bool:
    """Whether a layer has weights for its own state and takes one step at a time."""
    if not any(name.startswith("weight_hh") for name in record.parameters):
        return False
    shape = () if record.inputs is None else record.inputs.shape
    if "batch_first" not in record.options:
        return True  # a cell
    time = 1 if record.options["batch_first"] else 0
    return len(shape) == _SEQUENCES and shape[time] == 1
