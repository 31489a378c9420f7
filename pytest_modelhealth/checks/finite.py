"""No NaN and no infinity, traced to the layer that made the first one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks.check import ALWAYS, Check
from pytest_modelhealth.checks.evidence import called, completed, innermost, is_inside
from pytest_modelhealth.settings import Settings

if TYPE_CHECKING:
    from pytest_modelhealth.report import LayerRecord, Observation, Violation
    from pytest_modelhealth.statistics import TensorStatistics

Bad = Callable[["TensorStatistics | None"], bool]


class Finite(Check):
    """Every value is a number.

    The culprit is the layer that turned finite inputs into something else. Layers that only pass
    it on are counted, not listed. Negative infinity alone is what masks are made of: it counts only
    where the loss or a gradient is not finite in the end.
    """

    name = "finite"
    summary = "No NaN and no infinity in inputs, parameters, buffers, activations or gradients."
    gravity = 10
    definition = (
        "No NaN and no infinity anywhere. The culprit is the innermost layer that made them from "
        "finite inputs; -inf alone, which masks are made of, counts only where the loss or a "
        "gradient is not finite in the end."
    )
    source = "IEEE 754: a NaN in the loss makes every parameter NaN in the next step"
    minimum_evidence = "one batch; gradients are judged where a backward pass ran"

    def run(self, observation: Observation, settings: Settings) -> Iterator[Violation]:
        """Yield one violation for each layer where non-finite values begin."""
        state = list(_state(observation))
        forward = list(_forward(observation, {violation.layer for violation in state}))
        if state or forward:
            yield from state
            yield from forward
        elif not _is_finite_loss(observation):
            yield _loss(observation)
        else:
            yield from _backward(observation)


def _is_nan_or_positive_inf(statistics: TensorStatistics | None) -> bool:
    return statistics is not None and statistics.nan_count + statistics.positive_inf_count > 0


def _is_not_finite(statistics: TensorStatistics | None) -> bool:
    return statistics is not None and statistics.nonfinite_count > 0


def _is_finite_loss(observation: Observation) -> bool:
    return observation.loss is None or math.isfinite(observation.loss)


def _state(observation: Observation) -> Iterator[Violation]:
    """Yield parameters that are not finite and buffers that are NaN.

    An infinite buffer is usually a mask.
    """
    for record in observation.layers.values():
        for name, statistics in record.parameters.items():
            if statistics.nonfinite_count:
                cause = "an initialiser, a step or a checkpoint wrote it: look before this batch"
                yield _violation(observation, record, "parameters", statistics, cause, tensor=name)
        for name, statistics in record.buffers.items():
            if statistics.nan_count:
                cause = "a running statistic met NaN in training, or the buffer was never filled"
                yield _violation(observation, record, "buffers", statistics, cause, tensor=name)


def _forward(observation: Observation, explained: set[str]) -> Iterator[Violation]:
    is_bad: Bad = _is_nan_or_positive_inf
    if not _any(observation, is_bad) and not _is_finite_loss(observation):
        is_bad = _is_not_finite
    root = observation.layers.get("")
    if root is not None and is_bad(root.inputs) and root.inputs is not None:
        cause = "the batch itself holds them: look at the data, not at the model"
        yield _violation(observation, root, "inputs", root.inputs, cause)
        return
    for record in _origins(observation, is_bad):
        if record.name not in explained and record.activations is not None:
            cause = _forward_cause(record, observation)
            yield _violation(observation, record, "activations", record.activations, cause)


def _any(observation: Observation, is_bad: Bad) -> bool:
    return any(is_bad(record.activations) for record in called(observation))


def _origins(observation: Observation, is_bad: Bad) -> list[LayerRecord]:
    """Return the innermost layers that made bad activations from inputs that were not."""
    bad = [record for record in called(observation) if is_bad(record.activations)]
    origins = [r for r in bad if r.inputs is not None and not is_bad(r.inputs)]
    origins += [r for r in bad if _fed_itself(r)]
    if not origins:  # inputs unwatched, or a layer fed with its own output: the first to return
        origins = innermost(bad)[:1]
    return innermost(origins)


def _fed_itself(record: LayerRecord) -> bool:
    """Whether a layer made its first bad values in a call before it was given any."""
    given, made = (record.nonfinite_calls.get(role) for role in ("inputs", "activations"))
    return given is not None and made is not None and made < given


def _forward_cause(record: LayerRecord, observation: Observation) -> str:
    out, given = record.activations, record.inputs
    assert out is not None
    if record.activation in ("softmax", "log_softmax") and given and given.negative_inf_count:
        return "a row of its input is nothing but -inf: every position is masked"
    if out.inf_count and out.dtype == "float16":
        return f"float16 ends at 65504{_reach(given)}: scale down, or use bfloat16 or float32 here"
    if any(is_inside(name, record.name) for name in observation.layers):
        return (
            f"its own forward makes them between its submodules{_reach(given)}: look for a "
            "division, log, sqrt, exp or power there"
        )
    if record.type_name in _LINEAR and not (given and given.negative_inf_count):
        return f"its products overflow {out.dtype}{_reach(given)}"
    return (
        f"a division by zero, a log or root outside its domain, or an overflow{_reach(given)}: "
        "clamp the argument or add an epsilon"
    )


_LINEAR = ("Linear", "Conv1d", "Conv2d", "Conv3d", "Bilinear")


def _reach(statistics: TensorStatistics | None) -> str:
    if statistics is None or not statistics.finite_count:
        return ""
    return f" (its inputs lie in [{statistics.min:.3g}, {statistics.max:.3g}])"


def _loss(observation: Observation) -> Violation:
    root = observation.layers[""]
    return Finite.violation(
        root,
        f"the loss is {observation.loss} although every activation is finite",
        value=math.nan if observation.loss is None else observation.loss,
        role="loss",
        cause="the loss function: log(0), a division by an empty mask, or labels out of range"
        f"{_reach_of_output(root)}",
    )


def _reach_of_output(root: LayerRecord) -> str:
    out = root.activations
    return f" (outputs lie in [{out.min:.3g}, {out.max:.3g}])" if out and out.finite_count else ""


def _backward(observation: Observation) -> Iterator[Violation]:
    """Yield where the backward pass turns finite gradients into something else.

    Gradients flow from the layer that ran last to the first: the last layer with bad ones is where
    they begin; what follows it took its output and sent the bad gradient back.
    """
    bad = [record for record in called(observation) if _is_not_finite(record.gradients)]
    for record in innermost(bad)[-1:]:
        assert record.gradients is not None
        cause = _backward_cause(record, observation)
        yield _violation(observation, record, "gradients", record.gradients, cause)
    if bad:
        return
    for record in observation.layers.values():
        for name, statistics in record.parameter_gradients.items():
            if statistics.nonfinite_count:
                cause = "its own backward makes them: the gradients that reach it are finite"
                yield _violation(
                    observation, record, "parameter_gradients", statistics, cause, tensor=name
                )


def _backward_cause(record: LayerRecord, observation: Observation) -> str:
    after = [r for r in called(observation) if (r.entered or 0) > completed(record)]
    what = "the loss" if not after else f"{after[0].label!r} or the arithmetic before it"
    return (
        f"the backward of {what}, which takes this output, makes them: the derivative of sqrt, "
        f"norm, pow or log at 0, or of a masked division{_reach(record.activations)}"
    )


def _violation(
    observation: Observation,
    record: LayerRecord,
    role: str,
    statistics: TensorStatistics,
    cause: str,
    tensor: str = "",
) -> Violation:
    subject = role.replace("_", " ").removesuffix("s") if tensor else role.replace("_", " ")
    where = f"{subject} {tensor!r}" if tensor else subject
    return Finite.violation(
        record,
        f"{_counts(statistics)} of {statistics.count} values in its {where}"
        f"{_from(role)}{_first(record, role, statistics, observation)}",
        value=float(statistics.nonfinite_count),
        limit=ALWAYS,
        role=role,
        tensor=tensor,
        cause=cause,
        affected=_affected(observation, record),
    )


def _from(role: str) -> str:
    return ", made from finite inputs" if role == "activations" else ""


def _first(
    record: LayerRecord, role: str, statistics: TensorStatistics, observation: Observation
) -> str:
    """Say where the first one is: index, sample, and the call where there are several."""
    if statistics.first_nonfinite is None:
        return ""
    index = statistics.first_nonfinite
    text = f", the first at [{', '.join(map(str, index))}]"
    per_batch = observation.samples / observation.batches
    if role not in ("parameters", "parameter_gradients", "buffers") and index:
        text += f" (sample {index[0]})" if statistics.shape[:1] == (per_batch,) else ""
    call = record.nonfinite_calls.get(role)
    return f"{text} of call {call + 1} of {record.calls}" if call and record.calls > 1 else text


def _counts(statistics: TensorStatistics) -> str:
    parts = ((statistics.nan_count, "NaN"), (statistics.inf_count, "inf"))
    return " and ".join(f"{count} {name}" for count, name in parts if count)


def _affected(observation: Observation, culprit: LayerRecord) -> tuple[str, ...]:
    """Return the other layers that show non-finite values."""
    return tuple(
        record.name
        for record in called(observation)
        if record is not culprit
        and (_is_not_finite(record.activations) or _is_not_finite(record.gradients))
    )
