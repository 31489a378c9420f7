"""The step of a `LightningModule`, with no trainer that runs it.

It calls ``training_step`` and what Lightning calls around it.
Clipping and accumulation are those of the `Trainer` that is given in place of a step, or that
the module is attached to.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pytest_modelhealth.capture.step.batch import (
    LIGHTNING_MODULES,
    arguments_of,
    is_lightning,
    is_own,
    log_nothing,
    loss_in,
)
from pytest_modelhealth.capture.step.isolation import random_numbers_kept
from pytest_modelhealth.capture.step.state import contents_kept
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.training.libraries import is_of
from pytest_modelhealth.training.stepping.givers import Given
from pytest_modelhealth.training.stepping.session import TrainingStep, optimizers_in

_FABRICS = {"lightning": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
_TRAINERS = ("lightning.pytorch.trainer", "pytorch_lightning.trainer")


def recognises(given: Given) -> bool:
    """Whether the model is a `LightningModule`, and neither a step nor a loss was given."""
    is_step = given.step is None or is_of(given.step, *_TRAINERS)
    comes_alone = given.loss is None and given.target is None
    is_one = given.inputs is None or given.batch is None
    return is_step and comes_alone and is_one and is_lightning(given.model)


@contextmanager
def made(given: Given) -> Iterator[TrainingStep]:
    """Return the step; meanwhile, the module believes to be run by Fabric."""
    module: Any = given.model
    batch = given.inputs if given.batch is None else given.batch
    if batch is None:
        raise InspectionError("the step of a LightningModule needs a batch: run_step(batch=...)")
    trainer = given.step if given.step is not None else getattr(module, "_trainer", None)
    with _attached(module, trainer) as fabric:
        plan = _plan(module, given.optimizer)
        if module.automatic_optimization and len(plan.optimizers) > 1:
            raise InspectionError(
                f"configure_optimizers() of {type(module).__name__} returns "
                f"{len(plan.optimizers)} optimizers, which automatic optimization does not "
                "take: set self.automatic_optimization = False, as Lightning asks for"
            )
        fabric.optimizers = plan.optimizers
        fabric.lr_scheduler_configs = plan.schedules
        module._fabric_optimizers = plan.optimizers
        step = _Step(fabric, plan, trainer)
        optimizer = plan.optimizers[0] if len(plan.optimizers) == 1 else (*plan.optimizers,)
        restore = (*(each.scheduler for each in plan.schedules), *given.restored)
        steps_them = bool(module.automatic_optimization)
        yield TrainingStep(
            step, optimizer, batch, restore, "training_step", has_schedules=steps_them
        )


class _Schedule(NamedTuple):
    """A schedule of the learning rate, and when it is stepped."""

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1


class _Plan(NamedTuple):
    """What `configure_optimizers` returned."""

    optimizers: list[Any]
    schedules: list[_Schedule]


class _Step:
    """One step of the training, as a `Trainer` makes it.

    Args:
        fabric: what the module believes to be run by.
        plan: optimizers and schedules.
        trainer: whose clipping and accumulation are followed, if there is one.
    """

    def __init__(self, fabric: Any, plan: _Plan, trainer: Any) -> None:
        self._fabric = fabric
        self._plan = plan
        self._clip = getattr(trainer, "gradient_clip_val", None)
        self._clips_by = getattr(trainer, "gradient_clip_algorithm", None)
        self._accumulated = int(getattr(trainer, "accumulate_grad_batches", 1))
        self._number = 0

    def __call__(self, module: Any, optimizer: Any, batch: Any) -> Any:
        """Make one step; return the loss."""
        self._fabric.losses.clear()
        with _needing_no_trainer(module):
            module.on_train_batch_start(batch, self._number)
            if module.automatic_optimization:
                output = self._run(module, optimizer, batch)
                self._step_schedules(module)
            else:
                output = self._training_step(module, batch)
            module.on_train_batch_end(output, batch, self._number)
        self._number += 1
        loss = loss_in(output)
        return self._fabric.losses_together() if loss is None else loss

    def _run(self, module: Any, optimizer: Any, batch: Any) -> Any:
        """Make a step of automatic optimization."""
        outputs: list[Any] = []

        def closure() -> Any:
            outputs.clear()
            for index in range(self._accumulated):
                outputs.append(self._training_step(module, batch))
                loss = loss_in(outputs[-1])
                if not index:
                    module.on_before_zero_grad(optimizer)
                    module.optimizer_zero_grad(0, self._number, optimizer)
                if loss is not None:
                    loss = loss / self._accumulated
                    module.on_before_backward(loss)
                    module.backward(loss)
                    module.on_after_backward()
            module.on_before_optimizer_step(optimizer)
            if self._clip or is_own(module, "configure_gradient_clipping"):
                module.configure_gradient_clipping(optimizer, self._clip, self._clips_by)
            return loss_in(outputs[-1])

        closure_runs = torch.enable_grad()(closure)
        if is_own(module, "optimizer_step") or isinstance(optimizer, torch.optim.LBFGS):
            module.optimizer_step(0, self._number, optimizer, closure_runs)
        else:
            closure_runs()
            optimizer.step()
        return outputs[-1] if outputs else None

    def _training_step(self, module: Any, batch: Any) -> Any:
        arguments = arguments_of(module, batch, self._number)
        return module.training_step(*arguments.args, **arguments.kwargs)

    def _step_schedules(self, module: Any) -> None:
        for each in self._plan.schedules:
            is_due = each.interval == "step" and (self._number + 1) % each.frequency == 0
            if is_due and not isinstance(each.scheduler, ReduceLROnPlateau):
                module.lr_scheduler_step(each.scheduler, None)


@contextmanager
def _attached(module: nn.Module, trainer: Any) -> Iterator[Any]:
    """Have the module, and those in it, run by Fabric, and log nothing."""
    fabric = _fabric(module, trainer)
    parts: list[Any] = [part for part in module.modules() if is_lightning(part)]
    with contents_kept(map(vars, parts)):
        for part in parts:
            part.trainer = None
        for part in parts:
            part.fabric = fabric
            part.log = part.log_dict = log_nothing
        yield fabric


def _fabric(module: nn.Module, trainer: Any) -> Any:
    """Return a `Fabric` that keeps the losses that went backward, and else is like the trainer."""
    own = next(k.__module__ for k in type(module).__mro__ if k.__module__ in LIGHTNING_MODULES)
    base: Any = importlib.import_module(_FABRICS[own.partition(".")[0]]).Fabric

    class Fabric(base):  # type: ignore[misc]
        def backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
            self.losses.append(tensor.detach())
            super().backward(tensor, *args, **kwargs)

        def losses_together(self) -> Any:
            return sum(self.losses[1:], self.losses[0]) if self.losses else None

        def __getattr__(self, name: str) -> Any:
            if trainer is None or name.startswith("_"):
                raise AttributeError(name)
            return getattr(trainer, name)

    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.losses = []
    return fabric


def _plan(module: Any, optimizer: Any) -> _Plan:
    """Return the optimizers and schedules of a module, those that were given before its own."""
    if optimizer is not None:
        return _Plan(optimizers_in(optimizer), [])
    with random_numbers_kept(), _needing_no_trainer(module):
        configured = module.configure_optimizers()
    plan = _Plan([], [])
    several = configured if isinstance(configured, tuple | list) else [configured]
    if len(several) == 2 and all(isinstance(part, tuple | list) for part in several):
        plan.optimizers.extend(several[0])
        plan.schedules.extend(map(_schedule, several[1]))
    else:
        for one in several:
            _add(one, plan)
    if not plan.optimizers:
        raise InspectionError(
            f"configure_optimizers() of {type(module).__name__} returns no optimizer; give it "
            "another: run_step(optimizer=..., batch=...)"
        )
    return plan


def _add(one: Any, plan: _Plan) -> None:
    if isinstance(one, Mapping):
        plan.optimizers.append(one["optimizer"])
        if one.get("lr_scheduler") is not None:
            plan.schedules.append(_schedule(one["lr_scheduler"]))
    elif one is not None:
        plan.optimizers.append(one)


def _schedule(one: Any) -> _Schedule:
    if not isinstance(one, Mapping):
        return _Schedule(one)
    return _Schedule(one["scheduler"], one.get("interval", "epoch"), one.get("frequency", 1) or 1)


@contextmanager
def _needing_no_trainer(module: nn.Module) -> Iterator[None]:
    """Explain what a module asks of a trainer that is not there.

    Raises:
        InspectionError: it asks for something that only a `Trainer` has.
    """
    try:
        yield
    except AttributeError as error:
        if "self.trainer." not in str(error):
            raise
        raise InspectionError(
            f"the training step of {type(module).__name__} asks its Trainer for something, and "
            f"none runs here: {error} Give the Trainer too, run_step(trainer, batch=batch), or a "
            "step of your own, run_step(step, optimizer, batch)"
        ) from error
