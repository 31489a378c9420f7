"""The step of a `transformers.Trainer`.

It calls ``training_step`` of a trainer, then clips and steps as the trainer does.
Where it accumulates gradients, it is given the batch as often.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.capture.step.guard import Guard
from pytest_modelhealth.capture.step.state import State
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.training.stepping.givers import is_of
from pytest_modelhealth.training.stepping.session import TrainingStep


def recognises(given: TrainingStep) -> bool:
    """Whether a trainer was given in place of a step."""
    return is_of(given.step, "transformers.trainer")


@contextmanager
def made(given: TrainingStep) -> Iterator[TrainingStep]:
    """Return the step; in the end, trainer and accelerator are as they were."""
    trainer = given.step
    _require(given)
    with _guard(trainer):
        optimizer, prepared = _optimizers(trainer, given.optimizer)
        model = trainer.accelerator.prepare_model(given.model, device_placement=False)
        if model is not given.model:
            raise InspectionError(
                f"the trainer wraps the model in a {type(model).__name__}, which no single "
                "step can be made of: give a trainer without it"
            )
        if getattr(trainer, "_created_lr_scheduler", False):
            trainer.lr_scheduler = None  # of an earlier training; each has its own
        scheduler = trainer.create_scheduler(_steps(trainer), optimizer)
        scaler = getattr(trainer.accelerator, "scaler", None)
        restore = (scheduler, *([] if scaler is None else [scaler]), *given.restore)
        step = _step(trainer, prepared, scheduler)
        yield given._replace(step=step, optimizer=optimizer, restore=restore, name="training_step")


def _require(given: TrainingStep) -> None:
    trainer = given.step
    if given.model is not trainer.model:
        raise InspectionError(
            "the trainer trains another object than this model: inspector(trainer.model)"
        )
    if given.batch is None:
        raise InspectionError(
            "the step of a Trainer needs a batch as its data_collator makes it: "
            "run_step(trainer, batch=next(iter(trainer.get_train_dataloader())))"
        )
    parallel = str(trainer.accelerator.distributed_type).rpartition(".")[2]
    if parallel != "NO" or trainer.args.n_gpu > 1:
        raise InspectionError(
            "the trainer trains on several devices; a step is run on one: make it with one, "
            "CUDA_VISIBLE_DEVICES=0 say"
        )


def _step(trainer: Any, prepared: Any, scheduler: Any) -> Callable[[Any, Any, Any], Any]:
    """Return one step of the optimizer, of all batches that the trainer accumulates for it.

    Args:
        trainer: the trainer.
        prepared: the optimizer as the accelerator prepared it.
        scheduler: the schedule of the learning rate.
    """

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        """Make one step; return the loss as the trainer logs it."""
        args, accelerator = trainer.args, trainer.accelerator
        count = args.gradient_accumulation_steps
        each = iter([copy.copy(batch) for _ in range(count)])
        batches, items = trainer.get_batch_samples(each, count, args.device)
        trainer.current_gradient_accumulation_steps = count
        losses = []
        for number, inputs in enumerate(batches, start=1):
            accelerator.sync_gradients = number == count
            losses.append(Inputs(model, inputs, items).call(trainer.training_step))
        if args.max_grad_norm is not None and args.max_grad_norm > 0:
            accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        prepared.step()
        skipped = accelerator.optimizer_step_was_skipped
        if not skipped and not isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step()
        model.zero_grad()
        return sum(losses[1:], losses[0])

    return step


def _guard(trainer: Any) -> Guard:
    """Return what puts back the attributes of a trainer, its accelerator and its model."""
    accelerator = trainer.accelerator
    holders = [trainer, accelerator, accelerator.gradient_state, trainer.model]
    lists = [accelerator._optimizers, accelerator._models, accelerator._schedulers]
    groups = [] if trainer.optimizer is None else _bare(trainer.optimizer).param_groups
    if trainer.optimizer is not None:
        holders += [trainer.optimizer, _bare(trainer.optimizer)]
    if trainer.lr_scheduler is not None:
        holders.append(trainer.lr_scheduler)
    return Guard(State(containers=[*map(vars, holders), *groups, *lists]))


def _optimizers(trainer: Any, given: Any) -> tuple[Any, Any]:
    """Return the optimizer of torch, and as the accelerator prepares it."""
    if given is not None:
        trainer.optimizer = given
    optimizer = _bare(trainer.create_optimizer() or trainer.optimizer)
    prepared = trainer.accelerator.prepare_optimizer(optimizer, device_placement=False)
    trainer.optimizer = prepared
    return optimizer, prepared


def _bare(optimizer: Any) -> Any:
    """Return the optimizer inside one that was prepared by an accelerator."""
    return optimizer.optimizer if is_of(optimizer, "accelerate.optimizer") else optimizer


def _steps(trainer: Any) -> int:
    """Return how many steps the training has, which the schedule of the rate depends on."""
    args, data = trainer.args, trainer.train_dataset
    if args.max_steps > 0 or not hasattr(data, "__len__"):
        return int(args.max_steps) if args.max_steps > 0 else _UNKNOWN
    batches: int = math.ceil(len(data) / args.train_batch_size)
    steps = max(batches // int(args.gradient_accumulation_steps), 1)
    return math.ceil(float(args.num_train_epochs) * steps)


_UNKNOWN = 1000
