"""`Levels`: what is usual for a positive statistic of each layer, and what it is lately."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import numpy.typing as npt

from pytest_modelhealth.training.monitoring.row import Reals

Mask = npt.NDArray[np.bool_]

LATELY = 5
"""How many of the latest values count as lately."""

OPENING = 10
"""How many of the first values are the beginning."""

_LEAST = 1e-30


def grown(values: Reals, count: int, fill: float = np.nan) -> Reals:
    """Return an array with as many columns as there are layers now."""
    missing = count - values.shape[-1]
    if not missing:
        return values
    widths = [(0, 0)] * (values.ndim - 1) + [(0, missing)]
    return np.pad(values, widths, constant_values=fill)


def held_of(mask: Mask, count: int) -> Mask:
    """Return a mask with as many columns as there are layers now: false for new ones."""
    missing = count - len(mask)
    return np.pad(mask, (0, missing)) if missing else mask


class Levels:
    """Logarithms of a statistic, layer by layer; of a step that has none for a layer, nothing.

    Args:
        zeros: whether zeros are values (next to nothing), or say nothing.

    Attributes:
        count: how many values each layer had.
        low, high: the least and the largest lately; NaN while there are few.
        opening: the mean of the first values.
        usual: the mean so far; it stands still while `held`.
        valid: which layers had a value in the latest step.
    """

    def __init__(self, *, zeros: bool = False) -> None:
        self._least = _LEAST if zeros else 0.0
        self._lately = np.full((LATELY, 0), np.nan)
        self.count = np.zeros(0, dtype=np.intp)
        self._is_opening = True
        self.low = self.high = np.zeros(0)
        self.opening = np.zeros(0)
        self.usual = np.zeros(0)
        self.valid = np.zeros(0, dtype=bool)

    def add(self, values: Reals, held: Mask | None = None) -> None:
        """Take the values of a step.

        Args:
            values: one of each layer.
            held: where what is usual is to stay as it is; fewer layers where some are new.
        """
        layers = len(values)
        if layers != len(self.count):
            self._grow(layers)
        if self._least:
            values = np.maximum(values, self._least)
        logs = np.log(values)
        self.valid = valid = np.isfinite(logs)
        columns = valid.nonzero()[0]
        count = self.count
        logs = logs[columns]
        self._lately[count[columns] % LATELY, columns] = logs
        count += valid
        self.low = low = np.minimum.reduce(self._lately)
        self.high = high = np.maximum.reduce(self._lately)
        if held is not None and held.any():
            learns = ~held_of(held, layers)[columns]
            columns, logs = columns[learns], logs[learns]
        # a single value far off says little once there are some; NaN, of few, bounds nothing
        kept = np.fmin(np.fmax(logs, low[columns]), high[columns])
        self.usual[columns] += (kept - self.usual[columns]) / count[columns]
        if self._is_opening:
            self.opening = np.where(count <= OPENING, self.usual, self.opening)
            self._is_opening = bool((count < OPENING).any())

    def _grow(self, layers: int) -> None:
        self._lately = grown(self._lately, layers)
        self.count = np.pad(self.count, (0, layers - len(self.count)))
        self._is_opening = True
        self.opening = grown(self.opening, layers, 0.0)
        self.usual = grown(self.usual, layers, 0.0)

    @property
    def reference(self) -> Reals:
        """The larger of what is usual and what was at the beginning."""
        larger: Reals = np.maximum(self.usual, self.opening)
        return larger


class Level:
    """The same of a single statistic, in plain numbers."""

    def __init__(self) -> None:
        self._lately: deque[float] = deque(maxlen=LATELY)
        self.count = 0
        self.low = self.high = math.nan
        self.opening = self.usual = 0.0

    def add(self, value: float, *, held: bool = False) -> None:
        """Take the value of a step; zeros and what is no number say nothing."""
        if not 0.0 < value < math.inf:
            return
        log = math.log(value)
        self.count += 1
        self._lately.append(log)
        if self.count >= LATELY:
            self.low, self.high = min(self._lately), max(self._lately)
        if not held:
            self.usual += (log - self.usual) / self.count
        if self.count <= OPENING:
            self.opening = self.usual

    @property
    def reference(self) -> float:
        """The larger of what is usual and what was at the beginning."""
        return max(self.usual, self.opening)
