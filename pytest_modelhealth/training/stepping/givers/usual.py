"""The usual training step of a batch, a target and a loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.capture.step.loss import TaskLosses, compute_loss
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.training.stepping.givers.giver import Given, Giver
from pytest_modelhealth.training.stepping.session import (
    NEEDS_OPTIMIZER,
    TrainingStep,
    optimizers_in,
)


class Usual(Giver):
    """Makes the usual step of inputs, target and loss, where nothing else was given."""

    precedence = -1

    def recognises(self, given: Given) -> bool:
        """Whether no step was given."""
        return given.step is None

    @contextmanager
    def made(self, given: Given) -> Iterator[TrainingStep]:
        """Return the step."""
        step, batch = UsualStep(given.loss), (given.inputs, given.target)
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
        made = TrainingStep.of(step, given.optimizer, batch, given.restored)
        yield made._replace(is_usual=True)


class UsualStep:
    """Clears the gradients, runs forward and backward, and steps each optimizer once.

    Args:
        loss: what is differentiated, as in an inspection.
    """

    def __init__(self, loss: Any) -> None:
        self._loss: Any = TaskLosses(loss) if isinstance(loss, Mapping) else loss

    def __call__(self, model: nn.Module, optimizer: Any, batch: tuple[Any, Any]) -> Any:
        """Make one step on inputs and target; return the loss."""
        inputs, target = Inputs.of(batch[0]), batch[1]
        optimizers = optimizers_in(optimizer)
        for one in optimizers:
            one.zero_grad()
        loss = compute_loss(model(*inputs.args, **inputs.kwargs), target, self._loss)
        if loss is None:
            raise InspectionError("the model returns no number to differentiate: give loss=...")
        loss.backward()
        for one in optimizers:
            one.step()
        return loss
