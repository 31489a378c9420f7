"""The step of a `LightningModule`, with no trainer that runs it.

It calls ``training_step`` and what Lightning calls around it.
Clipping and accumulation are those of the `Trainer` that is given in place of a step, or that
the module is attached to.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from pytest_modelhealth.capture.observing.tensors import is_a
from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.capture.step.guard import Guard
from pytest_modelhealth.capture.step.state import State
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.training.stepping.givers import is_of
from pytest_modelhealth.training.stepping.session import TrainingStep, optimizers_in

_FABRICS = {"lightning": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
_TRAINERS = ("lightning.pytorch.trainer", "pytorch_lightning.trainer")
_MODULES = ("lightning.pytorch.core.module", "pytorch_lightning.core.module")
"""Where `LightningModule` is defined."""


def recognises(given: TrainingStep) -> bool:
    """Whether the model is a `LightningModule`, and neither a step nor a loss was given."""
    is_step = given.step is None or is_of(given.step, *_TRAINERS)
    comes_alone = given.loss is None and given.target is None
    is_one = given.inputs is None or given.batch is None
    return is_step and comes_alone and is_one and is_of(given.model, *_MODULES)


@contextmanager
def made(given: TrainingStep) -> Iterator[TrainingStep]:
    """Return the step; meanwhile, the module believes to be run by Fabric."""
    module: Any = given.model
    batch = given.inputs if given.batch is None else given.batch
    if batch is None:
        raise InspectionError("the step of a LightningModule needs a batch: run_step(batch=...)")
    trainer = given.step if given.step is not None else getattr(module, "_trainer", None)
    try:
        with _attached(module, trainer) as fabric:
            optimizers, schedules = _configured(module, given.optimizer)
            if module.automatic_optimization and len(optimizers) > 1:
                raise InspectionError(
                    f"{type(module).__name__} has {len(optimizers)} optimizers, which automatic "
                    "optimization does not take: set self.automatic_optimization = False, as "
                    "Lightning asks for"
                )
            fabric.optimizers = module._fabric_optimizers = optimizers
            fabric.lr_scheduler_configs = schedules
            step = _step(fabric, schedules, trainer)
            optimizer = optimizers[0] if len(optimizers) == 1 else (*optimizers,)
            restore = (*(each.scheduler for each in schedules), *given.restore)
            yield TrainingStep(module, step, optimizer, batch, restore, name="training_step")
    except AttributeError as error:
        if "self.trainer." not in str(error):
            raise
        raise InspectionError(
            f"the training step of {type(module).__name__} asks its Trainer for something, and "
            f"none runs here: {error} Give the Trainer too, run_step(trainer, batch=batch), or a "
            "step of your own, run_step(step, optimizer, batch)"
        ) from error


def _step(fabric: Any, schedules: list[Any], trainer: Any) -> Callable[[Any, Any, Any], Any]:
    """Return one step of the training, as a `Trainer` makes it.

    Args:
        fabric: what the module believes to be run by.
        schedules: those of the learning rate.
        trainer: whose clipping and accumulation are followed, if there is one.
    """
    number = 0

    def step(module: Any, optimizer: Any, batch: Any) -> Any:
        nonlocal number
        fabric.losses.clear()
        module.on_train_batch_start(batch, number)
        if module.automatic_optimization:
            output = _optimized(module, optimizer, batch, number, trainer)
            for each in schedules:
                is_due = each.interval == "step" and (number + 1) % each.frequency == 0
                if is_due and not isinstance(each.scheduler, ReduceLROnPlateau):
                    module.lr_scheduler_step(each.scheduler, None)
        else:
            output = _training_step(module, batch, number)
        module.on_train_batch_end(output, batch, number)
        number += 1
        loss = _loss_in(output)
        return sum(fabric.losses) if loss is None and fabric.losses else loss

    return step


def _training_step(module: Any, batch: Any, number: int) -> Any:
    """Call it; `Inputs` go in as they are."""
    if not is_a(batch, Inputs):
        parameters = inspect.signature(module.training_step).parameters.values()
        takes_number = len(parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
        batch = Inputs(batch, number) if takes_number else Inputs(batch)
    return batch.call(module.training_step)


def _loss_in(output: Any) -> Any:
    """Return the loss in what a `training_step` returned: itself, or what is under ``"loss"``."""
    return output.get("loss") if isinstance(output, Mapping) else output


def _is_own(module: object, method: str) -> bool:
    """Whether a `LightningModule` defines a method itself."""
    found = getattr(type(module), method, None)
    return found is not None and found.__module__ not in _MODULES


def _optimized(module: Any, optimizer: Any, batch: Any, number: int, trainer: Any) -> Any:
    """Make a step of automatic optimization; return what the last training step did."""
    clip = getattr(trainer, "gradient_clip_val", None)
    clips_by = getattr(trainer, "gradient_clip_algorithm", None)
    accumulated = int(getattr(trainer, "accumulate_grad_batches", 1))
    output: Any = None

    @torch.enable_grad()
    def closure() -> Any:
        nonlocal output
        for index in range(accumulated):
            output = _training_step(module, batch, number)
            loss = _loss_in(output)
            if not index:
                module.on_before_zero_grad(optimizer)
                module.optimizer_zero_grad(0, number, optimizer)
            if loss is not None:
                loss = loss / accumulated
                module.on_before_backward(loss)
                module.backward(loss)
                module.on_after_backward()
        module.on_before_optimizer_step(optimizer)
        if clip or _is_own(module, "configure_gradient_clipping"):
            module.configure_gradient_clipping(optimizer, clip, clips_by)
        return _loss_in(output)

    if _is_own(module, "optimizer_step") or isinstance(optimizer, torch.optim.LBFGS):
        module.optimizer_step(0, number, optimizer, closure)
    else:
        closure()
        optimizer.step()
    return output


@contextmanager
def _attached(module: nn.Module, trainer: Any) -> Iterator[Any]:
    """Have the module, and those in it, run by Fabric, and log nothing."""
    fabric = _fabric(module, trainer)
    parts: list[Any] = [part for part in module.modules() if is_of(part, *_MODULES)]
    with Guard(State(containers=map(vars, parts)), numbers=False):
        for part in parts:
            part.trainer = None
        for part in parts:
            part.fabric = fabric
            part.log = part.log_dict = lambda *_, **__: None  # they ask for the trainer
        yield fabric


def _fabric(module: nn.Module, trainer: Any) -> Any:
    """Return a `Fabric` that keeps the losses that went backward, and else is like the trainer."""
    own = next(k.__module__ for k in type(module).__mro__ if k.__module__ in _MODULES)
    base: Any = importlib.import_module(_FABRICS[own.partition(".")[0]]).Fabric

    class Fabric(base):  # type: ignore[misc]
        losses: ClassVar[list[Tensor]] = []

        def backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
            self.losses.append(tensor.detach())
            super().backward(tensor, *args, **kwargs)

        def __getattr__(self, name: str) -> Any:
            if trainer is None or name.startswith("_"):
                raise AttributeError(name)
            return getattr(trainer, name)

    return Fabric(accelerator="cpu", devices=1)


def _configured(module: Any, given: Any) -> tuple[list[Any], list[Any]]:
    """Return the optimizers and schedules of a module, those that were given before its own."""
    if given is not None:
        return optimizers_in(given), []
    with Guard():
        configured = module.configure_optimizers()
    several = configured if isinstance(configured, tuple | list) else [configured]
    if len(several) == 2 and all(isinstance(part, tuple | list) for part in several):
        optimizers, schedules = list(several[0]), list(several[1])
    else:
        each = [one if isinstance(one, Mapping) else {"optimizer": one} for one in several]
        each = [one for one in each if one["optimizer"] is not None]
        optimizers = [one["optimizer"] for one in each]
        schedules = [s for one in each if (s := one.get("lr_scheduler")) is not None]
    if not optimizers:
        raise InspectionError(
            f"configure_optimizers() of {type(module).__name__} returns no optimizer; give it "
            "another: run_step(optimizer=..., batch=...)"
        )
    each = [one if isinstance(one, Mapping) else {"scheduler": one} for one in schedules]
    usual = {"interval": "epoch", "frequency": 1}
    return optimizers, [SimpleNamespace(**{**usual, **one}) for one in each]
