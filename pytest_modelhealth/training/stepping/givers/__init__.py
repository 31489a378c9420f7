"""What a training step is made of: the user's own, the usual one, or that of a library.

A library has a file with ``recognises(given)`` and ``made(given)``, a context; it is not imported
before an object of it is given.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.capture.step.loss import compute_loss
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.training.stepping.session import (
    NEEDS_OPTIMIZER,
    TrainingStep,
    name_of,
    optimizers_in,
)


def step_of(given: TrainingStep) -> AbstractContextManager[TrainingStep]:
    """Return a context of the step that is made of what was given; in the end nothing is left.

    Raises:
        InspectionError: no step can be made of it; the message says why.
    """
    from pytest_modelhealth.training.stepping.givers import lightning, transformers

    several = isinstance(given.restore, tuple | list | set)
    given = given._replace(restore=tuple(given.restore) if several else (given.restore,))
    if lightning.recognises(given):
        return lightning.made(given)
    if transformers.recognises(given):
        return transformers.made(given)
    return nullcontext(_usual(given) if given.step is None else _own(given))


def _own(given: TrainingStep) -> TrainingStep:
    """Take ``step(model, optimizer, batch)`` as it is."""
    if any(one is not None for one in (given.inputs, given.target, given.loss)):
        raise InspectionError(
            "inputs, target and loss are of the usual step: leave the step out, or give a step "
            "of your own its batch, run_step(step, optimizer, batch)"
        )
    return given._replace(name=name_of(given.step))


def _usual(given: TrainingStep) -> TrainingStep:
    """Make the usual step of inputs, target and loss, where nothing else was given."""
    if given.batch is not None:
        raise InspectionError(
            "batch is of a step of your own: run_step(step, optimizer, batch); the usual step "
            "takes inputs=, target= and loss="
        )
    if given.inputs is None:
        raise InspectionError(
            "the usual step needs inputs: run_step(optimizer=..., inputs=..., target=..., "
            "loss=...); a step of your own goes first: run_step(step, optimizer, batch)"
        )
    if given.optimizer is None:
        raise InspectionError(NEEDS_OPTIMIZER)
    batch = given.inputs, given.target
    return given._replace(step=UsualStep(given.loss), batch=batch, name="UsualStep")


def is_of(value: object, *packages: str) -> bool:
    """Whether a package defines the type of an object, or one that it derives from."""
    names = [f"{kind.__module__}." for kind in type(value).__mro__]
    return any(name.startswith(f"{package}.") for name in names for package in packages)


class UsualStep:
    """Clears the gradients, runs forward and backward, and steps each optimizer once.

    Args:
        loss: what is differentiated, as in an inspection.
    """

    def __init__(self, loss: Any) -> None:
        self._loss = loss

    def __call__(self, model: nn.Module, optimizer: Any, batch: tuple[Any, Any]) -> Any:
        """Make one step on inputs and target; return the loss."""
        inputs, target = Inputs.of(batch[0]), batch[1]
        optimizers = optimizers_in(optimizer)
        for one in optimizers:
            one.zero_grad()
        loss = compute_loss(inputs.call(model), target, self._loss)
        if loss is None:
            raise InspectionError("the model returns no number to differentiate: give loss=...")
        loss.backward()
        for one in optimizers:
            one.step()
        return loss
