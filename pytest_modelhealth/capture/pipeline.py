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
from pytest_modelhealth.capture.observing.flow import FlowRecorder, Source
from pytest_modelhealth.capture.observing.scaling import NO_SCALE, LossScale
from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.apart import Inspection
from pytest_modelhealth.capture.step.batch import Inputs, batch_size
from pytest_modelhealth.capture.step.collection import collected_rarely
from pytest_modelhealth.capture.step.company import Company, in_company
from pytest_modelhealth.capture.step.forward import observed_eagerly, read_state
from pytest_modelhealth.capture.step.interruption import exited_whole
from pytest_modelhealth.capture.step.prepare import Step, named_inputs, prepare
from pytest_modelhealth.capture.step.settle import settle
from pytest_modelhealth.capture.step.untouched import untouched
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import named_modules
from pytest_modelhealth.report import Kind, Observation
from pytest_modelhealth.report.observation import LossCall, merged_calls
from pytest_modelhealth.report.stages import flow_of_stage, joined_stages, stages_of

_SCHEDULES = "torch.distributed.pipelining.schedules"
_STAGES = "torch.distributed.pipelining.stage"


class PipelineEngine(Engine):
    """Runs one step of a schedule: the microbatches of a batch, forward and backward.

    All ranks of the pipeline inspect their schedules at the same time; each sees its own stages.
    The schedule has the loss and runs the backward pass itself.
    """

    precedence: ClassVar[int] = 1
    runs_in_torch: ClassVar[bool] = False  # on one rank alone nothing can be run again
    spans_ranks: ClassVar[bool] = True
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
        stages = stages_here(model)
        if len(stages) == 1:
            module: nn.Module = stages[0].submod
            return module
        return nn.ModuleDict({f"stage{stage.stage_index}": stage.submod for stage in stages})

    def run(self, request: Request) -> Observation:
        """Run one step of the schedule, watched, and return what the stages of this rank showed.

        Raises:
            InspectionError: the request asks for what the schedule itself decides.
            Exception: whatever a stage, the loss or the communication raises, untouched.
        """
        stages = self.run_stages(request)
        only = next(iter(stages.values()))
        return only if len(stages) == 1 else joined_stages(stages, type(request.model).__name__)

    @collected_rarely()
    def run_stages(self, request: Request) -> dict[int, Observation]:
        """Run one step of the schedule, watched, and return what each stage of this rank showed.

        Raises:
            InspectionError: the request asks for what the schedule itself decides.
            Exception: whatever a stage, the loss or the communication raises, untouched.
        """
        schedule, model = request.model, self.module(request.model)
        _refuse(request)
        stages = stages_here(schedule)
        with exited_whole(_kept(schedule, *stages), in_company(model)) as company:
            for stage in stages:
                stage.submod = _unwrapped(stage.submod)
            if not _is_initialised(schedule):
                inspection = Inspection(company.state, schedule)
                with untouched(inspection, (request.inputs, request.target)):
                    _run(schedule, request)  # it runs stages on memory that nobody has written
            return _watched(request, model, stages, company)


def _watched(
    request: Request, model: nn.Module, stages: list[Any], company: Company
) -> dict[int, Observation]:
    step = prepare(_arguments(request), model, [*company.notes], company.state, company)
    recorder, inspection = step.recorder, step.inspection
    recorder.flow.is_on = False  # a layer is called once for each microbatch
    schedule = request.model
    with exited_whole(
        inspection.apart(), untouched(inspection, step.batch), observed_eagerly(recorder)
    ) as hooks:
        inspection.hooks = hooks
        step.functions = hooks.functions if hooks.functions.is_on else None
        recorder.expect(_microbatch(stages, step.samples, schedule), _scale(schedule))
        first_calls = [_FirstCall(stage, step) for stage in stages]
        for stage in stages:
            stage.backward_weight_one_chunk = _WeightGradients(stage, step)
        with hooks.differentiating():
            losses = _run(schedule, request)
        recorder.expect(step.samples, NO_SCALE)
        if losses:
            recorder.add_loss(torch.stack([loss.detach() for loss in losses]).mean())
        _read(step)
    return _by_stage(settle(step), stages, first_calls, int(schedule._n_microbatches))


def _by_stage(
    seen: Observation, stages: list[Any], first_calls: list[_FirstCall], microbatches: int
) -> dict[int, Observation]:
    """Return what was seen of each stage, with the flow of its first microbatch."""
    numbers = [int(stage.stage_index) for stage in stages]
    is_only = len(numbers) == 1
    each = {numbers[0]: seen} if is_only else stages_of(seen, numbers)
    return {
        number: replace(
            each[number],
            flow=call.flow.flow() if is_only else flow_of_stage(call.flow.flow(), number),
            own_functions=call.flow.has_own_functions,
            loss=seen.loss if stage.is_last else None,
            given=seen.given if stage.is_first else (),
            loss_calls=_of_all_microbatches(seen.loss_calls, microbatches) if stage.is_last else (),
        )
        for number, stage, call in zip(numbers, stages, first_calls, strict=True)
    }


def _of_all_microbatches(calls: tuple[LossCall, ...], microbatches: int) -> tuple[LossCall, ...]:
    """Return the calls of a loss that each microbatch makes, each once, over all of them."""
    each = len(calls) // microbatches
    if each * microbatches != len(calls):
        return calls
    return tuple(merged_calls(calls[number::each]) for number in range(each))


class _FirstCall:
    """Records the flow of a stage's first microbatch: all others go the same way.

    Args:
        stage: the stage, which it is put into.
        step: the step that runs.
    """

    def __init__(self, stage: Any, step: Step) -> None:
        self.flow = FlowRecorder()
        self._module, self._step = stage.submod, step
        self._forward = stage.forward_maybe_with_nosync
        self._is_over = False
        stage.forward_maybe_with_nosync = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a microbatch."""
        if self._is_over:
            return self._forward(*args, **kwargs)
        self._is_over = True
        hooks, usual = self._step.hooks, self._step.recorder.flow
        with torch._C.DisableTorchFunction():
            self.flow.name_sources(self._sources(args, kwargs))
        hooks.flow = hooks.functions.flow = self.flow
        try:
            output = self._forward(*args, **kwargs)
        finally:
            hooks.flow = hooks.functions.flow = usual
        with torch._C.DisableTorchFunction():
            self.flow.finish(find_tensors(output), None, is_given=True)
        return output

    def _sources(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Source]:
        yield from named_inputs(Inputs(*args, **kwargs))
        for kind, held in ((Kind.PARAMETER, "_parameters"), (Kind.BUFFER, "_buffers")):
            for named in named_modules(self._module):
                for name, tensor in getattr(named.module, held).items():
                    if tensor is not None:
                        yield kind, (named.name, name), tensor


class _WeightGradients:
    """Runs the second half of a split backward, which computes the gradients of weights.

    It passes the layers of the first half again, with the same gradients, which count once. What
    leads to no input of the stage is passed here alone.

    Args:
        stage: the stage, which it is put into.
        step: the step that runs.
    """

    def __init__(self, stage: Any, step: Step) -> None:
        self._step, self._backward = step, stage.backward_weight_one_chunk

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it for a microbatch."""
        hooks = self._step.hooks
        hooks.passes_again = True
        try:
            return self._backward(*args, **kwargs)
        finally:
            hooks.passes_again = False


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return what DDP wraps: a schedule would have its reducer wait for other ranks."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        inside: nn.Module = module.module
        return _unwrapped(inside)
    return module


def _read(step: Step) -> None:
    """Read what the stages hold, and the gradients that the schedule left, scaled by it."""
    parameters = read_state(step)
    step.is_differentiated = step.request.backward is not False
    if not step.is_differentiated:
        return
    with step.parameters_shown():
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


def stages_here(schedule: Any) -> list[Any]:
    """Return the stages that this rank has, in order."""
    stages = getattr(schedule, "_stages", None)
    return [schedule._stage] if stages is None else list(stages)


def _is_stage(model: object) -> bool:
    return _is_of(model, _STAGES, "_PipelineStageBase")


def _is_of(model: object, module: str, name: str) -> bool:
    """Whether `model` is of a class of a module of torch, which nobody needs to have loaded."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(model, kind)
