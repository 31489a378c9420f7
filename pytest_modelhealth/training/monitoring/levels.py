"""What is usual of a statistic and what it is lately, step by step, in constant memory."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from pytest_modelhealth.training.monitoring.row import Reals

Mask = npt.NDArray[np.bool_]

LATELY = 5
"""How many of the latest values count as lately."""

OPENING = 10
"""How many of the first values are the beginning."""

_LEAST = 1e-30


def grown(values: Any, count: int, fill: float = np.nan) -> Any:
    """Return an array with as many columns as there are layers now."""
    missing = count - values.shape[-1]
    if not missing:
        return values
    widths = [(0, 0)] * (values.ndim - 1) + [(0, missing)]
    return np.pad(values, widths, constant_values=fill)


class Levels:
    """Logarithms of a statistic, layer by layer; of a step that has none for a layer, nothing.

    Args:
        zeros: whether zeros are values (next to nothing), or say nothing.

    Attributes:
        count: how many values each layer had.
        low, high: the least and the largest lately; NaN while there are few.
        opening: the mean of the first values.
        usual: the mean so far; it stands still where an event goes on.
        valid: which layers had a value in the latest step.
    """

    def __init__(self, *, zeros: bool = False) -> None:
        self._least = _LEAST if zeros else 0.0
        self._lately = np.full((LATELY, 0), np.nan)
        self._is_opening = True
        self.count = np.zeros(0, dtype=np.intp)
        self.low = self.high = self.opening = self.usual = np.zeros(0)
        self.valid = np.zeros(0, dtype=bool)

    def add(self, values: Reals, going_on: Mask | None = None) -> None:
        """Take the values of a step, and where an event goes on, so that nothing is usual."""
        layers = len(values)
        if layers != len(self.count):
            self._lately = grown(self._lately, layers)
            self.count = np.pad(self.count, (0, layers - len(self.count)))
            self.opening, self.usual = (grown(v, layers, 0.0) for v in (self.opening, self.usual))
            self._is_opening = True
        if self._least:
            values = np.maximum(values, self._least)
        logs = np.log(values)
        self.valid = np.isfinite(logs)
        columns, count = self.valid.nonzero()[0], self.count
        logs = logs[columns]
        self._lately[count[columns] % LATELY, columns] = logs
        count += self.valid
        self.low = low = np.minimum.reduce(self._lately)
        self.high = high = np.maximum.reduce(self._lately)
        if going_on is not None and going_on.any():
            learns = ~grown(going_on, layers, False)[columns]
            columns, logs = columns[learns], logs[learns]
        # a single value far off says little once there are some; NaN, of few, bounds nothing
        kept = np.fmin(np.fmax(logs, low[columns]), high[columns])
        self.usual[columns] += (kept - self.usual[columns]) / count[columns]
        if self._is_opening:
            self.opening = np.where(count <= OPENING, self.usual, self.opening)
            self._is_opening = bool((count < OPENING).any())

    @property
    def reference(self) -> Reals:
        """The larger of what is usual and what was at the beginning."""
        larger: Reals = np.maximum(self.usual, self.opening)
        return larger


class Level:
    """The same of a single statistic, in plain numbers; zeros say nothing."""

    def __init__(self) -> None:
        self._lately: deque[float] = deque(maxlen=LATELY)
        self.count = 0
        self.low = self.high = math.nan
        self.opening = self.usual = 0.0

    def add(self, value: float, *, going_on: bool = False) -> None:
        """Take the value of a step."""
        if not 0.0 < value < math.inf:
            return
        log = math.log(value)
        self.count += 1
        self._lately.append(log)
        if self.count >= LATELY:
            self.low, self.high = min(self._lately), max(self._lately)
        if not going_on:
            self.usual += (log - self.usual) / self.count
        if self.count <= OPENING:
            self.opening = self.usual

    @property
    def reference(self) -> float:
        """The larger of what is usual and what was at the beginning."""
        return max(self.usual, self.opening)


class Runs:
    """For how many steps in a row something went on in each layer, and since which step."""

    def __init__(self) -> None:
        self.count: Reals = np.zeros(0)
        self.since: Reals = np.zeros(0)

    def add(self, active: Mask, valid: Mask, step: int) -> None:
        """Take a step: where something goes on, and where the step tells of it at all."""
        count, self.since = (grown(v, len(active), 0.0) for v in (self.count, self.since))
        self.since[active & (count == 0.0)] = step
        self.count = np.where(active, count + 1.0, np.where(valid, 0.0, count))
