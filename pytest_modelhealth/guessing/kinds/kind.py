"""`Kind`: one kind of model, and where it says what it takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from torch import nn

from pytest_modelhealth.guessing.drawing import Candidate
from pytest_modelhealth.guessing.trying import Trial


class Kind(ABC):
    """One kind of model."""

    precedence: ClassVar[int] = 1
    """Who has more is asked earlier."""

    @abstractmethod
    def recognises(self, model: nn.Module) -> bool:
        """Whether a model is of this kind."""

    @abstractmethod
    def candidates(self, model: nn.Module, trial: Trial) -> Iterator[Candidate]:
        """Yield batches to be tried, the likeliest first; the first that runs is taken.

        Args:
            model: the model.
            trial: runs a batch, for kinds that learn of what failed.
        """
