"""What a training step is made of: the user's own, the usual one, or that of a library.

The kinds of libraries are a shelf: one a file, found by itself. None of the libraries is imported
before an object of theirs is given.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, ClassVar, NamedTuple

from torch import nn

from pytest_modelhealth.capture.step.batch import Inputs
from pytest_modelhealth.capture.step.loss import TaskLosses, compute_loss
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.training.stepping.session import (
    NEEDS_OPTIMIZER,
    TrainingStep,
    optimizers_in,
)


class Given(NamedTuple):
    """The arguments of `Inspector.run_step`, and its model."""

    model: nn.Module
    step: Any = None
    optimizer: Any = None
    batch: Any = None
    restore: Any = ()
    inputs: Any = None
    target: Any = None
    loss: Any = None

    @property
    def restored(self) -> tuple[Any, ...]:
        """What else the step changes, as a tuple."""
        several = isinstance(self.restore, tuple | list | set)
        return tuple(self.restore) if several else (self.restore,)


class Giver(ABC):
    """One kind of thing that a step can be made of."""

    precedence: ClassVar[int] = 1
    """Who has more is asked earlier."""

    @abstractmethod
    def recognises(self, given: Given) -> bool:
        """Whether a step is made here of what was given."""

    @abstractmethod
    def made(self, given: Given) -> AbstractContextManager[TrainingStep]:
        """Return a context of the step; in the end all is as it was.

        Raises:
            InspectionError: no step can be made of it.
        """


def step_of(given: Given) -> AbstractContextManager[TrainingStep]:
    """Return a context of the step that is made of what was given; in the end nothing is left.

    Raises:
        InspectionError: no step can be made of it; the message says why.
    """
    return next(giver.made(given) for giver in _givers() if giver.recognises(given))


@cache
def _givers() -> tuple[Giver, ...]:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    givers = [kind() for kind in Giver.__subclasses__()]
    return tuple(sorted(givers, key=lambda giver: -giver.precedence))


class OwnStep(Giver):
    """Takes ``step(model, optimizer, batch)`` as it is."""

    precedence = 0

    def recognises(self, given: Given) -> bool:
        """Whether a step was given."""
        return given.step is not None

    @contextmanager
    def made(self, given: Given) -> Iterator[TrainingStep]:
        """Return the step."""
        if any(one is not None for one in (given.inputs, given.target, given.loss)):
            raise InspectionError(
                "inputs, target and loss are of the usual step: leave the step out, or give a step "
                "of your own its batch, run_step(step, optimizer, batch)"
            )
        yield TrainingStep.of(given.step, given.optimizer, given.batch, given.restored)


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
