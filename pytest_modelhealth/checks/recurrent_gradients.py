"""Recurrent layers of which a part gets no gradient: one step read, or one layer of a stack."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from pytest_modelhealth.checks.check import ALWAYS, Check, Finding
from pytest_modelhealth.checks.facts import at, called, flow_of

if TYPE_CHECKING:
    from pytest_modelhealth.report import LayerRecord, Observation
    from pytest_modelhealth.report.flow import Vertex
    from pytest_modelhealth.statistics import TensorStatistics

_INPUT, _STATE, _REVERSE = "weight_ih", "weight_hh", "_reverse"
_SEQUENCES = 3
_FEWEST_STEPS = 2
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


def recurrent_gradients(check: type[Check], observation: Observation) -> Iterator[Finding]:
    """Yield, as findings of a check, the recurrent layers of which a part learns nothing."""
    for record in called(observation):
        found = parts(record)
        learning = [part for part in found if part.learns]
        if not learning:
            continue  # the whole layer is silent: that is told elsewhere
        idle = [part for part in found if not (part.learns or part.remembers)]
        if idle:
            yield _unread(check, record, idle, learning, observation)
        steps = _steps(record, observation)
        forgetful = [part for part in learning if not part.remembers]
        if forgetful and steps is not None and steps >= _FEWEST_STEPS:
            yield _one_step(check, record, forgetful, found, steps, observation)


def _unread(
    check: type[Check],
    record: LayerRecord,
    idle: list[Part],
    learning: list[Part],
    observation: Observation,
) -> Finding:
    """Return that a layer of a stack is not read, or one direction of it."""
    level = {part.suffix.removesuffix(_REVERSE) for part in learning}
    is_direction = all(part.suffix.removesuffix(_REVERSE) in level for part in idle)
    line = _reading(record, observation)
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
    return check.violation(
        record,
        f"the gradients of its {names} are exactly zero, those of its other "
        f"{'direction' if is_direction else 'layers'} are not",
        value=0.0,
        limit=ALWAYS,
        tensor=f"{_INPUT}{idle[0].suffix}",
        cause=cause,
        severity="warn" if is_direction else "fail",
    )


def _one_step(
    check: type[Check],
    record: LayerRecord,
    forgetful: list[Part],
    found: list[Part],
    steps: int,
    observation: Observation,
) -> Finding:
    """Return that weights of a state get no gradient, since only a first step is read."""
    picks = _operations(record, observation)
    chosen = [one for one in picks if one.function in _CHOOSES or len(one.operands) > 1]
    names = " and ".join(f"{_STATE}{part.suffix}" for part in forgetful)
    text = (
        f"the gradient of its {names} is exactly zero over {steps} steps, that of the weights of "
        "its inputs is not"
    )
    if chosen:
        doubt = f"`{chosen[0].function}`{at(chosen[0].line)} may choose first steps on this batch"
        return check.inconclusive(record, f"{text}, but {doubt} alone: give longer sequences")
    line = _reading(record, observation)
    suffixes = {part.suffix for part in found if part.remembers}
    is_half = any(_other_direction(part.suffix) in suffixes for part in forgetful)
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
    return check.violation(
        record,
        text,
        value=0.0,
        limit=ALWAYS,
        tensor=f"{_STATE}{forgetful[0].suffix}",
        cause=cause,
        severity="warn" if is_half else "fail",
    )


def _other_direction(suffix: str) -> str:
    return suffix.removesuffix(_REVERSE) if suffix.endswith(_REVERSE) else suffix + _REVERSE


def _steps(record: LayerRecord, observation: Observation) -> int | None:
    """Return of how many steps a sequence is; ``None`` where that does not show (packed ones).

    A cell takes one step a call, if it is given what it made of the step before.
    """
    if "batch_first" not in record.options:
        flow = flow_of(observation)
        calls = flow.calls(record.name) if record.name in flow else ()
        if len(calls) < _FEWEST_STEPS:
            return None
        is_carried = not flow.after(*calls[0].outputs).isdisjoint(calls[1].inputs)
        return len(calls) if is_carried else None
    shape = () if record.inputs is None else record.inputs.shape
    if len(shape) != _SEQUENCES:
        return None
    return shape[1 if record.options["batch_first"] else 0]


def _operations(record: LayerRecord, observation: Observation) -> tuple[Vertex, ...]:
    """Return the operations on what a layer gives out, up to the next layers."""
    flow = flow_of(observation)
    if record.name not in flow:
        return ()
    takers = flow.consumers(record.name)
    made = flow.operations(record.name, *takers) if takers else ()
    return tuple(one for one in made if one.function in _PICKS | _CHOOSES)


def _reading(record: LayerRecord, observation: Observation) -> str:
    """Return the line that picks what is read, where one does."""
    lines = (one.line for one in _operations(record, observation) if one.line)
    return next(lines, "")
