"""What is usual of a statistic and what it is lately, step by step, in constant memory."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_modelhealth.training.monitoring.row import Reals

Mask = npt.NDArray[np.bool_]

LATELY = 5
"""How many of the latest values count as lately."""

OPENING = 10
"""How many of the first values are the beginning."""

_FEW = 15
"""With no more values nothing is usual."""

_LEAST = 1e-30


class Levels:
    """Logarithms of a statistic, of each layer or of the model; where a step has none, nothing.

    Args:
        zeros: whether zeros are values (next to nothing), or say nothing.

    Attributes:
        count: how many values there were.
        low, high: the least and the largest lately; NaN while there are few.
        opening: the mean of the first values.
        usual: the mean so far; it stands still where an event goes on.
        valid: where the latest step had a value.
    """

    low: Any
    high: Any
    valid: Any

    def __init__(self, *, zeros: bool = False) -> None:
        self._least = _LEAST if zeros else 0.0
        self._lately: Any = None
        self.count: Any = 0
        self.opening: Any = 0.0
        self.usual: Any = 0.0

    def add(self, values: Reals | float, is_on: Mask | bool = False) -> None:
        """Take the values of a step, and where an event goes on, so that nothing is usual."""
        logs = np.log(np.maximum(values, self._least) if self._least else values)
        self.valid = valid = np.isfinite(logs)
        if self._lately is None:
            self._lately = np.full((LATELY, *np.shape(logs)), np.nan)
        lately = self._lately
        np.copyto(lately[:-1], lately[1:], where=valid)
        np.copyto(lately[-1:], logs, where=valid)
        self.low, self.high = np.minimum.reduce(lately), np.maximum.reduce(lately)
        self.count = count = self.count + valid
        learns = valid if is_on is False else valid & ~np.asarray(is_on)
        self.usual = np.where(learns, self.usual + (logs - self.usual) / count, self.usual)
        self.opening = np.where(count <= OPENING, self.usual, self.opening)

    @property
    def reference(self) -> Any:
        """The larger of what is usual and what was at the beginning."""
        return np.maximum(self.usual, self.opening)

    def rose(self, factor: float) -> Any:
        """Whether all of the latest values are above the reference by a factor."""
        return (self.low - self.reference > math.log(factor)) & (self.count > _FEW)

    def fell(self, factor: float) -> Any:
        """Whether all of the latest values are below what is usual by a factor."""
        return (self.usual - self.high > math.log(factor)) & (self.count > _FEW)


class Runs:
    """For how many steps in a row something went on in each layer, and since which step."""

    def __init__(self) -> None:
        self.count: Any = 0.0
        self.since: Any = 0.0

    def add(self, active: Mask, valid: Mask, step: int) -> None:
        """Take a step: where something goes on, and where the step tells of it at all."""
        self.since = np.where(active & (self.count == 0.0), step, self.since)
        self.count = np.where(active, self.count + 1.0, np.where(valid, 0.0, self.count))
