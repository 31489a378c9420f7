"""`LossCourse`: how the loss goes, by running medians."""

from __future__ import annotations

import math
import statistics
from collections import deque

from pytest_modelhealth.report import LossSummary

_WINDOW = 9
_OPENING = 5


class LossCourse:
    """Follows the loss in constant memory.

    Attributes:
        summary: how it went so far.
    """

    def __init__(self) -> None:
        self.summary = LossSummary()
        self._latest: deque[float] = deque(maxlen=_WINDOW)
        self._opening: list[float] = []
        self._count = 0
        self._first = math.nan
        self._best, self._best_step = math.inf, 0
        self._noise = 0.0
        self._level = math.nan
        self._never_negative = True

    def add(self, step: int, loss: float | None) -> None:
        """Take the loss of a step; one that is no number says nothing of a level."""
        if loss is None or not math.isfinite(loss):
            return
        if len(self._opening) < _OPENING:
            self._opening.append(loss)
            self._first = _level_of(self._opening)
        if self._count >= _OPENING:
            self._add_noise(abs(loss - self._level))
        self._count += 1
        self._never_negative &= loss >= 0.0
        self._latest.append(loss)
        self._level = statistics.median(self._latest)
        if self._count >= _OPENING and self._level < self._best:
            self._best, self._best_step = self._level, step
        self.summary = LossSummary(
            self._count,
            self._first,
            min(self._best, self._level),
            self._best_step,
            self._level,
            self._noise,
            self._never_negative,
            loss,
        )

    def _add_noise(self, deviation: float) -> None:
        """Average deviations, the recent ones more; a single large one says little."""
        if self._noise > 0.0 and self._count > 2 * _WINDOW:
            deviation = min(deviation, 5.0 * self._noise)
        self._noise += (deviation - self._noise) / min(self._count - _OPENING + 1, 50)


def _level_of(opening: list[float]) -> float:
    """Return the level that a loss begins with, whatever the first steps do to it."""
    first, *others = opening
    if others and 0.0 < first < min(others) / _BLOWN_UP:
        return first
    return sorted(opening)[:2][-1]


_BLOWN_UP = 3.0
