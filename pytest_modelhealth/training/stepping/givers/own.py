"""A step that is the user's own function."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
        yield TrainingStep.of(given.step, given.optimizer, given.batch, given.restored)
