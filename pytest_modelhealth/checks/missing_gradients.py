"""Trainable parameters that the loss does not reach although it should."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pytest_modelhealth.checks.check import Check
from pytest_modelhealth.checks.evidence import (
    called,
    completed,
    consumers,
    innermost,
    is_inside,
    trainable,
)
from pytest_modelhealth.report import LayerRecord, Observation, Status, Violation
from pytest_modelhealth.settings import Settings


class MissingGradients(Check):
    """Every trainable parameter that took part in the output gets a gradient.

    A layer that was never called, and one whose output nothing uses (an idle expert, a pooler, a
    second head) has no gradient by design. The culprit is the last layer before the cut; those
    behind it are counted.
    """

    name = "missing_gradients"
    summary = "No trainable layer that feeds the output is cut off from the loss."
    gravity = 30
    definition = (
        "Every trainable layer whose output is used gets a gradient, and not one that is exactly "
        "zero without a closed gate or a silent activation after it. The culprit is the last layer "
        "before the cut."
    )
    source = "PyTorch's autograd: .grad is None where no path of the graph leads to the loss"
    minimum_evidence = "one batch with a backward pass"

    def run(self, observation: Observation, settings: Settings) -> Iterator[Violation]:
        """Yield where the graph is cut, or where the gradient becomes exactly zero."""
        if not observation.backward:
            return
        cut = [record for record in called(observation) if _lacks_gradient(record)]
        culprits = [record for record in cut if _is_cut_off(record, cut, observation)]
        for record in _last_before_each_cut(culprits):
            yield _missing(record, [other.name for other in cut if other is not record])
        if not cut and math.isfinite(observation.loss or 0.0):
            yield from _zero(observation)


def _lacks_gradient(record: LayerRecord) -> bool:
    parameters = trainable(record)
    return (
        bool(parameters)
        and "parameter_gradients" in record.watched
        and not any(name in record.parameter_gradients for name in parameters)
    )


def _is_cut_off(record: LayerRecord, cut: list[LayerRecord], observation: Observation) -> bool:
    """Whether the loss should have reached `record`, rather than not needing it.

    It should where the layer ran without a graph, where a layer that got gradients took its output,
    or where every trainable layer so far lacks its gradient while a later one has it.
    """
    if record.status is Status.NO_GRAD_PATH:
        return True
    if any(_got_gradient(taker) for taker in consumers(observation, record)):
        return True
    names = {layer.name for layer in cut}
    before = [r for r in called(observation) if trainable(r) and completed(r) <= completed(record)]
    after = [r for r in called(observation) if trainable(r) and completed(r) > completed(record)]
    return all(r.name in names for r in before) and any(r.parameter_gradients for r in after)


def _got_gradient(record: LayerRecord) -> bool:
    return record.gradients is not None or bool(record.parameter_gradients)


def _last_before_each_cut(culprits: list[LayerRecord]) -> list[LayerRecord]:
    """Return the latest of the culprits: the others lie behind the same cut."""
    return innermost(culprits)[-1:]


def _missing(record: LayerRecord, others: list[str]) -> Violation:
    if record.status is Status.NO_GRAD_PATH:
        cause = "it runs under torch.no_grad(), or its forward detaches or rounds what it returns"
    else:
        cause = (
            "the graph is cut after it: .detach(), .data, .item(), .numpy(), torch.tensor(...) or "
            "no_grad between it and the loss"
        )
    names = ", ".join(trainable(record))
    return Violation(
        check=MissingGradients.name,
        layer=record.name,
        role="parameter_gradients",
        value=float(len(trainable(record))),
        limit=0.0,
        origin="always",
        message=f"no gradient reaches its trainable parameters ({names})",
        cause=cause,
        affected=tuple(others),
    )


def _zero(observation: Observation) -> Iterator[Violation]:
    """Yield the last layer whose gradient is exactly zero for no reason that is a design."""
    zero = [record for record in called(observation) if _has_zero_gradient(record)]
    culprits = [record for record in zero if not _is_explained(record, observation)]
    for record in innermost(culprits)[-1:]:
        yield Violation(
            check=MissingGradients.name,
            layer=record.name,
            role="parameter_gradients",
            value=0.0,
            limit=0.0,
            origin="always",
            message="the gradient of its trainable parameters is exactly zero",
            cause=_zero_cause(record, observation),
            affected=tuple(other.name for other in zero if other is not record),
        )


def _has_zero_gradient(record: LayerRecord) -> bool:
    gradients = [s for name, s in record.parameter_gradients.items() if name not in record.frozen]
    arrived = record.gradients
    return (
        bool(gradients)
        and all(s.abs_max == 0.0 for s in gradients)
        and arrived is not None
        and arrived.abs_max == 0.0
    )


def _is_explained(record: LayerRecord, observation: Observation) -> bool:
    """Whether a zero gate after it, a silent activation or a loss of zero explains the zero."""
    if observation.loss == 0.0:
        return True
    after = [r for r in observation.layers.values() if completed(r) > completed(record)]
    gated = any(s.abs_max == 0.0 for r in after for s in trainable(r).values())
    silent = any(r.activations is not None and r.activations.dead_fraction == 1.0 for r in after)
    return gated or silent


def _zero_cause(record: LayerRecord, observation: Observation) -> str:
    after = [
        r
        for r in called(observation)
        if completed(r) > completed(record)
        and r.gradients is not None
        and r.gradients.abs_max > 0.0
        and not is_inside(record.name, r.name)
    ]
    if not after:
        return "the loss is flat at this output: a clamp, a saturated function or a constant"
    nearest = min(after, key=completed)
    return f"{nearest.label!r} gets a gradient and passes none on: saturated, clamped or times zero"
