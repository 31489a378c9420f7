"""A step that is the user's own function."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.training.stepping.givers.giver import Given, Giver
from pytest_modelhealth.training.stepping.session import TrainingStep


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
