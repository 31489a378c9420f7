"""Schedules of `torch.distributed.pipelining`: the stages of a model that this rank has."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pytest_modelhealth.capture.engine import Engine, Request
from pytest_modelhealth.capture.observing.scaling import NO_SCALE, LossScale
from pytest_modelhealth.capture.step.apart import Inspection
from pytest_modelhealth.capture.step.batch import Inputs, batch_size
from pytest_modelhealth.capture.step.collection import collected_rarely
from pytest_modelhealth.capture.step.forward import observed_eagerly, read_state
from pytest_modelhealth.capture.step.interruption import exited_whole
from pytest_modelhealth.capture.step.prepare import Step, prepare
from pytest_modelhealth.capture.step.settle import settle
from pytest_modelhealth.capture.step.state import State
from pytest_modelhealth.capture.step.untouched import untouched
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.report import Observation

_SCHEDULES = "torch.distributed.pipelining.schedules"
_STAGES = "torch.distributed.pipelining.stage"


class PipelineEngine(Engine):
    """Runs one step of a schedule: the microbatches of a batch, forward and backward.

    All ranks of the pipeline inspect their schedules at the same time; each sees its own stages.
    The schedule has the loss and runs the backward pass itself.
    """

    precedence: ClassVar[int] = 1
    runs_in_torch: ClassVar[bool] = False  # on one rank alone nothing can be run again
    why_not_measured: ClassVar[str] = (
        "a pipeline schedule runs on several ranks at once: the costs of a stage are those of its "
        "own module, Inspector(stage_module).summary(batch)"
    )

    def supports(self, model: object) -> bool:
        """Whether `model` is a schedule, or a stage without one."""
        return _is_of(model, _SCHEDULES, "_PipelineSchedule") or _is_stage(model)

    def module(self, model: Any) -> nn.Module:
        """Return the stage's own module, or all stages of this rank in one.

        Raises:
            InspectionError: `model` is a stage without a schedule.
        """
        if _is_stage(model):
            raise InspectionError(
                "cannot inspect a pipeline stage by itself: its inputs come from another rank; "
                "inspect the schedule that runs it, inspector(schedule), on all ranks, or the "
                "stage's own module with a batch of its own, inspector(stage.submod)"
            )
        stages = _stages(model)
        if len(stages) == 1:
            module: nn.Module = stages[0].submod
            return module
        return nn.ModuleDict({f"stage{stage.stage_index}": stage.submod for stage in stages})

    @collected_rarely()
    def run(self, request: Request) -> Observation:
        """Run one step of the schedule, watched.

        Raises:
            InspectionError: the request asks for what the schedule itself decides.
            Exception: whatever a stage, the loss or the communication raises, untouched.
        """
        schedule, model = request.model, self.module(request.model)
        _refuse(request)
        stages = _stages(schedule)
        state = State(model)
        with _kept(schedule, *stages):
            if not _is_initialised(schedule):
                with untouched(Inspection(state, schedule), (request.inputs, request.target)):
                    _run(schedule, request)  # it runs stages on memory that nobody has written
            return _watched(request, model, stages, state)


def _watched(request: Request, model: nn.Module, stages: list[Any], state: State) -> Observation:
    step = prepare(_arguments(request), model, [], state)
    recorder, inspection = step.recorder, step.inspection
    recorder.flow.is_on = False  # a layer is called once for each microbatch
    schedule = request.model
    with exited_whole(
        inspection.apart(), untouched(inspection, step.batch), observed_eagerly(recorder)
    ) as hooks:
        inspection.hooks = hooks
        recorder.expect(_microbatch(stages, step.samples, schedule), _scale(schedule))
        with hooks.differentiating():
            losses = _run(schedule, request)
        recorder.expect(step.samples, NO_SCALE)
        if losses:
            recorder.add_loss(torch.stack([loss.detach() for loss in losses]).mean())
        _read(step)
    return settle(step)


def _read(step: Step) -> None:
    """Read what the stages hold, and the gradients that the schedule left, scaled by it."""
    parameters = read_state(step)
    step.is_differentiated = step.request.backward is not False
    if not step.is_differentiated:
        return
    gradients = [(lyr, name, p.grad) for lyr, name, p in parameters if p.grad is not None]
    if step.request.averager is not None:
        gradients = step.request.averager(gradients)
    step.recorder.add_state("parameter_gradients", gradients)
    step.recorder.note_zero_slices()


def _run(schedule: Any, request: Request) -> list[Tensor]:
    """Run one step; return the losses of the microbatches, where this rank has the last stage."""
    arguments = Inputs.of(() if request.inputs is None else request.inputs)
    losses: list[Tensor] = []
    run = schedule.eval if request.backward is False else schedule.step
    run(
        *arguments.args,
        target=request.target,
        losses=losses if schedule._loss_fn is not None else None,
        **arguments.kwargs,
    )
    return losses


def _arguments(request: Request) -> Request:
    """Return the request of a rank that may have nothing to give its stage."""
    return replace(request, inputs=()) if request.inputs is None else request


def _refuse(request: Request) -> None:
    """Refuse what the schedule decides.

    Raises:
        InspectionError: the request asks for it.
    """
    schedule = type(request.model).__name__
    has_loss = request.model._loss_fn is not None
    if request.loss is not None:
        raise InspectionError(
            f"{schedule} has a loss of its own: leave loss out here, and give it to the schedule, "
            f"{schedule}(stage, n_microbatches, loss_fn=...)"
        )
    if request.scaler is not None or callable(request.backward):
        raise InspectionError(
            f"{schedule} runs the backward pass itself, for each microbatch: leave scaler out, and "
            "pass backward=None, True or False"
        )
    if request.backward is True and not has_loss:
        raise InspectionError(
            f"no backward pass: {schedule} was made without loss_fn; leave backward out to inspect "
            "the forward pass alone"
        )


def _scale(schedule: Any) -> LossScale:
    """Return by how much activations' gradients are larger than those of the mean loss.

    A schedule takes the number of microbatches off gradients of parameters, when all have run.
    """
    return LossScale(float(schedule._n_microbatches)) if schedule.scale_grads else NO_SCALE


def _microbatch(stages: list[Any], samples: int, schedule: Any) -> int:
    """Return how many samples a microbatch has."""
    if stages[0].is_first:
        return -(-samples // int(schedule._n_microbatches))
    received = [info.buffer for info in stages[0].args_recv_info.get(0, ())]
    return batch_size([buffer for buffer in received if isinstance(buffer, Tensor)])


def _is_initialised(schedule: Any) -> bool:
    """Whether shapes were exchanged, which takes a run of each stage."""
    flags = [name for name in vars(schedule) if name.endswith("_forward_initialized")]
    return all(getattr(schedule, name) for name in flags)


@contextmanager
def _kept(*objects: Any) -> Iterator[None]:
    """Put the attributes of a schedule and its stages back, and what plain containers held."""
    attributes = [dict(vars(one)) for one in objects]
    containers = [
        (value, value.copy())
        for held in attributes
        for value in held.values()
        if type(value) in (dict, list)
    ]
    try:
        yield
    finally:
        for one, held in zip(objects, attributes, strict=True):
            vars(one).clear()
            vars(one).update(held)
        for container, copy in containers:
            container.clear()
            if isinstance(container, dict):
                container.update(copy)
            else:
                container.extend(copy)


def _stages(schedule: Any) -> list[Any]:
    """Return the stages that this rank has, in order."""
    stages = getattr(schedule, "_stages", None)
    return [schedule._stage] if stages is None else list(stages)


def _is_stage(model: object) -> bool:
    return _is_of(model, _STAGES, "_PipelineStageBase")


def _is_of(model: object, module: str, name: str) -> bool:
    """Whether `model` is of a class of a module of torch, which nobody needs to have loaded."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(model, kind)
