"""Makes the `Observation` of a step that is over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pytest_modelhealth.capture.observing.records import layer_records
from pytest_modelhealth.capture.observing.scaling import LossScale
from pytest_modelhealth.capture.observing.tensors import version
from pytest_modelhealth.capture.step.prepare import Step
from pytest_modelhealth.layers import ensure_match
from pytest_modelhealth.report import LayerRecord, Observation


def settle(step: Step) -> Observation:
    """Return all that was seen.

    Raises:
        LayerNotFoundError: a rule of the request matches no layer.
    """
    recorder, notes = step.recorder, step.notes
    for name, tensor, before in step.versions:
        if before is not None and version(tensor) != before:
            notes.append(f"the forward wrote to {_described(name)}, which is not undone")
    named = [(layer.name, layer.module) for layer in recorder.layers.values()]
    ensure_match(step.request.selection.rules, named, step.request.model)
    layers = layer_records(
        recorder.layers.values(), backward=step.is_differentiated, functions=step.functions
    )
    recorder.let_go()
    recorder.loss_calls.settle()
    if step.scale.factor != 1.0:
        notes += _overflow(layers.values(), step.scale)
    return Observation(
        # what waits on a device is tensors, which a report must not hold either
        layers=dict(layers) if recorder.reader.ledger.has_queued else layers,
        model_type=recorder.layers[""].type_name,
        loss=recorder.loss,
        backward=step.is_differentiated,
        no_gradients=step.no_gradients,
        samples=step.samples,
        notes=(*notes, *recorder.notes),
        errors=tuple(recorder.errors),
        loss_calls=tuple(recorder.loss_calls.settled),
        loss_path=step.loss_path,
        unregistered=step.unregistered,
        tasks=step.task_gradients,
        own_functions=recorder.flow.has_own_functions,
        sample_deviation=recorder.sample_deviation,
        flow=recorder.flow.flow(),
        given=step.given,
    )


def _described(name: Sequence[str]) -> str:
    """Return a name of `Step.versions` for people."""
    if len(name) == 1:
        return f"tensor {name[0]} of the batch"
    return f"the parameter {'.'.join(filter(None, name))!r}"


def _overflow(layers: Iterable[LayerRecord], scale: LossScale) -> list[str]:
    """Return what to say of parameter gradients that are not finite under a loss scale."""
    gradients = [g for layer in layers for g in layer.parameter_gradients.values()]
    overflowed = sum(statistics.nonfinite_count > 0 for statistics in gradients)
    if not overflowed:
        return []
    note = (
        f"under the loss scale of {scale.factor:g} the gradients of {overflowed} of "
        f"{len(gradients)} parameters are not finite: GradScaler would skip this step and lower "
        "the scale"
    )
    return [note]
