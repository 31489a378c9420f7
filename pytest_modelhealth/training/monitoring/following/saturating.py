"""Follows bounded activations that come to stay at their ends."""

from __future__ import annotations

import numpy as np

from pytest_modelhealth.training.monitoring.following.follower import Follower
from pytest_modelhealth.training.monitoring.following.levels import OPENING, Levels
from pytest_modelhealth.training.monitoring.following.table import Table

_NOTED = 0.98
_FREE = 0.7


class SaturationFollower(Follower):
    """An episode lasts while the least of the latest is near 1, where it began well below."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self._levels = Levels(zeros=True)

    def see(self, table: Table) -> None:
        """See the latest step."""
        levels = self._levels
        values = table.values("saturation")
        if np.isnan(values).all() and not self._open:
            return
        levels.add(values)
        low, opening = np.exp(levels.low), np.exp(levels.opening)
        told = ~np.isnan(values) & (levels.count > OPENING)
        active = told & (low > _NOTED) & (opening < _FREE)
        self.mark(table, "ends", active, told, low, opening)
