"""Trainable parameters that the loss does not reach although it should."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from pytest_modelhealth.checks.check import ALWAYS, Check, Finding
from pytest_modelhealth.checks.data_flow import DataFlow, Port
from pytest_modelhealth.checks.evidence import (
    called,
    completed,
    consumers,
    innermost,
    is_inside,
    learns,
    leaves,
    parent,
    same_values,
    trainable,
)
from pytest_modelhealth.checks.loss import is_switched_off
from pytest_modelhealth.checks.zero_gradients import is_in_an_empty_part, zero_gradients
from pytest_modelhealth.settings import Settings

if TYPE_CHECKING:
    from pytest_modelhealth.report import LayerRecord, Observation, Violation
    from pytest_modelhealth.statistics import TensorStatistics


class MissingGradients(Check):
    """Every trainable parameter that took part in the output gets a gradient.

    A layer that was never called, and one whose output nothing uses (an idle expert, a pooler, a
    second head) has no gradient by design. The culprit is the last layer before the cut; those
    behind it are counted.
    """

    name = "missing_gradients"
    summary = "No trainable layer that feeds the output is cut off from the loss."
    gravity = 30
    reads_scale = True
    role = "parameter_gradients"
    definition = (
        "Every trainable layer whose output is used gets a gradient, and not one that is exactly "
        "zero without a closed gate or a silent activation after it. The culprit is the last layer "
        "before the cut."
    )
    source = "PyTorch's autograd: .grad is None where no path of the graph leads to the loss"
    minimum_evidence = "one batch with a backward pass"

    def run(self, observation: Observation, settings: Settings) -> Iterator[Finding]:
        """Yield where the graph is cut, or where the gradient becomes exactly zero."""
        if not observation.backward:
            return
        cut = [record for record in called(observation) if _lacking(record)]
        culprits = [record for record in cut if _is_cut_off(record, cut, observation)]
        flow = DataFlow(observation)
        ends = _last_before_each_cut(culprits, flow)
        if ends and _only_answers(observation):
            yield self.inconclusive(ends[0], _ANSWERS)
            return
        for record in ends:
            others = [other.name for other in cut if other is not record]
            yield _missing(record, observation, others, _design(record, observation, flow))
        if not cut and math.isfinite(observation.loss or 0.0) and not is_switched_off(observation):
            yield from zero_gradients(self, observation)


def _lacking(record: LayerRecord) -> list[str]:
    """Return the trainable parameters that got no gradient, and should have as far as it shows.

    A layer without layers inside uses all its parameters, or none; a container may hold some for
    other occasions (the token that stands for a masked patch).
    """
    if "parameter_gradients" not in record.watched:
        return []
    lacking = [name for name in trainable(record) if name not in record.parameter_gradients]
    partly = len(lacking) < len(trainable(record))
    return [] if partly and not record.unreached.issuperset(lacking) else lacking


def _is_cut_off(record: LayerRecord, cut: list[LayerRecord], observation: Observation) -> bool:
    """Whether the loss should have reached `record`, rather than not needing it.

    It should where the forward read a parameter, where the layer ran without a graph, where no
    output of the model depends on it although it ran, where a layer that got gradients took its
    output, or where every trainable layer so far lacks its gradient while a later one has it.
    """
    lacking = _lacking(record)
    if is_in_an_empty_part(record, observation) or _passes_its_input_on(record, observation):
        return False
    if not record.read_in_vain.isdisjoint(lacking):
        return not _is_in_an_optional_part(record, observation)
    if any(_got_gradient(r) for r in called(observation) if is_inside(r.name, record.name)):
        return False  # it is no cut that lies at a parameter of its own which nobody read
    if len(lacking) < len(trainable(record)):
        return _is_leaf(record, observation) and not _is_reached_elsewhere(record)
    if record.status == "no_grad_path":
        return not _is_a_slow_copy(record, observation)
    if record.unreached.issuperset(lacking) and _is_leaf(record, observation):
        if _is_detached_around(record, observation):
            return True
        is_spared = _ends_a_stack, _is_in_an_optional_part
        return not any(spared(record, observation) for spared in is_spared)
    if any(_got_gradient(taker) for taker in consumers(observation, record)):
        return True
    names = {layer.name for layer in cut}
    before = [r for r in called(observation) if trainable(r) and completed(r) <= completed(record)]
    after = [r for r in called(observation) if trainable(r) and completed(r) > completed(record)]
    return all(r.name in names for r in before) and any(r.parameter_gradients for r in after)


def _is_reached_elsewhere(record: LayerRecord) -> bool:
    """Whether its parameters learn although its output gets no gradient.

    A loss of the output's derivatives alone does not depend on what is only added to the output.
    """
    return "gradients" in record.watched and record.gradients is None


def _is_leaf(record: LayerRecord, observation: Observation) -> bool:
    return bool(record.name) and not any(is_inside(n, record.name) for n in observation.layers)


def _ends_a_stack(record: LayerRecord, observation: Observation) -> bool:
    """Whether it is the last of several alike that lead on, beside another that learns.

    The last residual of a stack whose output is the sum of skips (WaveNet) leads nowhere.
    """
    stem, _, index = record.name.rpartition(".")
    if not index.isdigit() or f"{stem}.{int(index) + 1}" in observation.layers:
        return False
    before = observation.layers.get(f"{stem}.{int(index) - 1}")
    if before is None or before.type_name != record.type_name or not learns(before):
        return False
    return any(
        other is not record and learns(other) and same_values(other.inputs, record.inputs)
        for other in leaves(observation)
    )


def _is_in_an_optional_part(record: LayerRecord, observation: Observation) -> bool:
    """Whether a module around it returned several tensors, of which some were used.

    A vision tower normalises its last hidden state for those who want it; a reader of an earlier
    one leaves it out.
    """
    around = [r for r in called(observation) if r.name and is_inside(record.name, r.name)]
    return any(_got_gradient(r) and _returned_several(r) for r in around)


def _is_a_slow_copy(record: LayerRecord, observation: Observation) -> bool:
    """Whether a layer with the very same parameters learns: a copy that makes targets of it."""
    return any(learns(other) and _are_copies(record, other) for other in called(observation))


def _are_copies(record: LayerRecord, other: LayerRecord) -> bool:
    """Whether another layer of the same kind has the very same trainable parameters."""
    return (
        other is not record
        and other.type_name == record.type_name
        and other.parameters.keys() == record.parameters.keys()
        and all(_are_equal(s, other.parameters[name]) for name, s in trainable(record).items())
    )


def _are_equal(a: TensorStatistics, b: TensorStatistics) -> bool:
    return a.shape == b.shape and (a.min, a.max, a.mean) == (b.min, b.max, b.mean)


def _is_detached_around(record: LayerRecord, observation: Observation) -> bool:
    """Whether a module around it returned what has no graph, although this layer made one."""
    return any(
        other.name and is_inside(record.name, other.name) and other.status == "no_grad_path"
        for other in called(observation)
    )


def _returned_several(record: LayerRecord) -> bool:
    out = record.activations
    return out is not None and out.count > record.calls * math.prod(out.shape)


def _passes_its_input_on(record: LayerRecord, observation: Observation) -> bool:
    """Whether a module around others did nothing to its input: an adapter without its context."""
    is_leaf = _is_leaf(record, observation)
    return not is_leaf and bool(record.name) and same_values(record.inputs, record.activations)


def _got_gradient(record: LayerRecord) -> bool:
    return record.gradients is not None or bool(record.parameter_gradients)


def _only_answers(observation: Observation) -> bool:
    """Whether a model in evaluation mode ran without a loss.

    It may answer by a way that it does not learn by: detectors detach their proposals.
    """
    has_loss = observation.loss_path is not None or bool(observation.loss_calls)
    root = observation.layers.get("")
    return not has_loss and root is not None and root.options.get("training") is False


_ANSWERS = (
    "no gradient reaches its trainable parameters, but a model in evaluation mode may have its "
    "loss in training mode only: inspect it there, or with a loss"
)


def _last_before_each_cut(culprits: list[LayerRecord], flow: DataFlow) -> list[LayerRecord]:
    """Return the culprits that feed no other of them: those lie behind the same cut."""
    culprits = innermost(culprits)
    names = {record.name for record in culprits}

    def feeds_another(record: LayerRecord) -> bool:
        reached = flow.reached(Port(record.name, output=True))
        return any(port.output and port.layer in names - {record.name} for port in reached)

    last = [record for record in culprits if not feeds_another(record)]
    return last or culprits[-1:]  # in a loop each feeds the other


def _missing(
    record: LayerRecord, observation: Observation, others: list[str], design: _Design | None
) -> Violation:
    names = _lacking(record)
    message = f"no gradient reaches its trainable parameters ({', '.join(names)})"
    return MissingGradients.violation(
        record,
        message if design is None else f"{message}: {design.settles}",
        value=float(len(names)),
        limit=ALWAYS,
        cause=_missing_cause(record, observation) if design is None else design.cause,
        affected=others,
        independent=True,
        severity="fail" if design is None else "warn",
    )


class _Design(NamedTuple):
    """A design that looks the same as a cut.

    Args:
        settles: what a user would change to say that it is meant.
        cause: what it may be, and what to change where it is not.
    """

    settles: str
    cause: str


def _design(record: LayerRecord, observation: Observation, flow: DataFlow) -> _Design | None:
    """Return the design that a whole part of the model without gradients may be, if there is one.

    A part that only takes what the model was given, while other parts learn, may learn elsewhere,
    or was trained before.
    """
    if not record.read_in_vain.isdisjoint(_lacking(record)):
        return None
    learning = [r.name for r in called(observation) if learns(r)]
    part = _part(record, observation, learning)
    if part is None or not learning or _takes_what_learns(part, observation, flow):
        return None
    inside = [r for r in called(observation) if r is part or is_inside(r.name, part.name)]
    if all(r.grad_off for r in inside if trainable(r)):
        return None if any(_has_a_frozen_copy(r, observation) for r in inside) else _off(part)
    return _detached(part) if _is_a_network_of_several(part, observation, learning) else None


def _off(part: LayerRecord) -> _Design:
    return _Design(
        f"freeze {part.label!r} by requires_grad_(False) if it is not to learn",
        f"{part.label!r} runs under torch.no_grad(), as a teacher, a feature extractor or a slow "
        "copy does; if it should learn, take no_grad away",
    )


def _detached(part: LayerRecord) -> _Design:
    return _Design(
        f"freeze {part.label!r} by requires_grad_(False), or pass only what learns, if it is not "
        "to learn here",
        f"all of {part.label!r} is cut off from the networks beside it, as a discriminator's step "
        f"detaches the generator; if it should learn, remove the detach ({_CUTS})",
    )


def _part(record: LayerRecord, observation: Observation, learning: list[str]) -> LayerRecord | None:
    """Return the outermost part of the model around a layer in which nothing learns."""
    if not record.name or len(_lacking(record)) < len(trainable(record)):
        return None
    part, name = record, record.name
    while (name := parent(name)) and not any(is_inside(n, name) or n == name for n in learning):
        part = observation.layers.get(name, part)
    return part


def _takes_what_learns(part: LayerRecord, observation: Observation, flow: DataFlow) -> bool:
    """Whether its inputs are certain to come from trainable layers that ran with gradients."""
    seen: set[Port] = set()
    port = flow.source(part.name)
    while port is not None and port not in seen:
        seen.add(port)
        if port.output and any(
            trainable(r) and not r.grad_off
            for r in called(observation)
            if r.name == port.layer or is_inside(r.name, port.layer)
        ):
            return True
        port = flow.source(port.layer)
    return False


def _has_a_frozen_copy(record: LayerRecord, observation: Observation) -> bool:
    """Whether a frozen layer of the very same parameters runs beside it: that is the slow one."""
    return bool(trainable(record)) and any(
        not trainable(other) and _are_copies(record, other) for other in called(observation)
    )


def _is_a_network_of_several(
    part: LayerRecord, observation: Observation, learning: list[str]
) -> bool:
    """Whether a part is one of several networks that a module runs, and all that learns is another.

    A network holds layers. It returned what has a graph, so that whoever called it cut it off. A
    trunk with a head, and the blocks of a list, are one network.
    """
    above = parent(part.name)
    if _is_leaf(part, observation) or part.status != "unused_in_loss":
        return False
    if part.name.rpartition(".")[2].isdigit():
        return False
    return all(is_inside(name, above) and parent(name) != above for name in learning)


_CUTS = ".detach(), .data, .item(), .numpy(), torch.tensor(...), argmax, a comparison or no_grad"


def _missing_cause(record: LayerRecord, observation: Observation) -> str:
    if not record.read_in_vain.isdisjoint(_lacking(record)) and not _is_leaf(record, observation):
        return (
            "its forward reads them, and the output does not depend on what it makes of them: "
            f"{_CUTS}"
        )
    if len(_lacking(record)) < len(trainable(record)):
        return (
            "the other parameters of this layer get theirs: its forward detaches these or reads "
            f"them through .data ({_CUTS})"
        )
    if record.status == "no_grad_path":
        return "it runs under torch.no_grad(), or its forward detaches or rounds what it returns"
    takers = [taker.label for taker in consumers(observation, record) if _got_gradient(taker)]
    if takers:
        return f"the graph is cut between it and {takers[0]!r}, which took its output: {_CUTS}"
    if record.unreached:
        return (
            "the model's output does not depend on it: what it returns is not used any more, or "
            f"the graph is cut after it by {_CUTS}"
        )
    return f"the graph is cut after it: {_CUTS} between it and the loss"
