"""`Giver`: makes a training step of what the user gave."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple

from torch import nn

from pytest_modelhealth.training.stepping.session import TrainingStep


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
