"""`Table`: the numbers of a step, with each layer in the same column in every step."""

from __future__ import annotations

from collections import deque

import numpy as np

from pytest_modelhealth.training.monitoring.following.levels import LATELY
from pytest_modelhealth.training.monitoring.following.loss import LossCourse
from pytest_modelhealth.training.monitoring.row import Reals, StepRow


class Table:
    """The latest step, and what of the earlier ones every follower asks for.

    Attributes:
        row: the latest step.
        layers: every layer that was seen so far, by column.
        loss: how the loss went.
        steps: how many steps were seen.
    """

    row: StepRow

    def __init__(self) -> None:
        self.layers: list[str] = []
        self.loss = LossCourse()
        self.steps = 0
        self._latest: deque[int] = deque(maxlen=LATELY)
        self._columns: dict[str, int] = {}
        self._known: tuple[str, ...] = ()
        self._where: np.ndarray[tuple[int], np.dtype[np.intp]] | None = None

    def take(self, row: StepRow) -> None:
        """Take the next step."""
        self.row = row
        self.steps += 1
        self._latest.append(row.step)
        self.loss.add(row.step, row.loss)
        if row.layers == self._known:
            return
        self._known = row.layers
        for layer in row.layers:
            if layer not in self._columns:
                self._columns[layer] = len(self.layers)
                self.layers.append(layer)
        where = np.array([self._columns[layer] for layer in row.layers], dtype=np.intp)
        is_same = np.array_equal(where, np.arange(len(self.layers)))
        self._where = None if is_same else where

    @property
    def lately(self) -> int:
        """The first of the steps that count as lately."""
        return self._latest[0]

    def column(self, layer: str) -> int:
        """Return the column of a layer."""
        return self._columns[layer]

    def values(self, statistic: str) -> Reals:
        """Return a statistic of every layer, NaN where the latest step has none."""
        values = self.row.values[statistic]
        if self._where is None:
            return values
        every = np.full(len(self.layers), np.nan)
        every[self._where] = values
        return every
