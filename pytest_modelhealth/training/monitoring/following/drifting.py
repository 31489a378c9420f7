"""Follows the size of weights: growth without end, and shrinking towards zero."""

from __future__ import annotations

import numpy as np

from pytest_modelhealth.training.monitoring.following.follower import Follower
from pytest_modelhealth.training.monitoring.following.levels import LATELY, Levels, grown
from pytest_modelhealth.training.monitoring.following.table import Table

_SMALL = 0.01
_GROWN = 10.0
_SHRUNK = 0.1


class DriftFollower(Follower):
    """Compares the size of weights with that at the beginning, and with the largest so far."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self._sizes = Levels(zeros=True)
        self._first = np.zeros(0)
        self._largest = np.zeros(0)

    def see(self, table: Table) -> None:
        """See the latest step."""
        sizes = table.values("parameter_rms")
        layers = len(sizes)
        levels = self._sizes
        levels.add(sizes)
        self._first = grown(self._first, layers)
        self._first = np.where(np.isnan(self._first), sizes, self._first)
        low, high = np.exp(levels.low), np.exp(levels.high)
        self._largest = np.fmax(grown(self._largest, layers, 0.0), low)
        told = levels.valid & (levels.count >= LATELY)
        start = np.maximum(self._first, _SMALL)
        growth = low / start
        left = high / self._largest
        active = told & (growth > _GROWN) & (low > 1.0)
        self.mark(table, "growth", active, told, low, start, role="parameters")
        active = told & (left < _SHRUNK)
        largest = self._largest
        self.mark(table, "shrinking", active, told, high, largest, role="parameters", sign=-1)
