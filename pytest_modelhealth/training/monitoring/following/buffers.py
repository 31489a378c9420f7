"""Follows running statistics that lie far from those of batches."""

from __future__ import annotations

import numpy as np

from pytest_modelhealth.training.monitoring.following.follower import Follower
from pytest_modelhealth.training.monitoring.following.levels import Levels
from pytest_modelhealth.training.monitoring.following.table import Table

_LEAST = 20
_FAR = 10.0


class BufferFollower(Follower):
    """Compares the running deviation with the usual deviation of what the layer is given."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self._running, self._given = Levels(), Levels()

    def see(self, table: Table) -> None:
        """See the latest step."""
        running = np.where(
            table.values("training_mode") == 1.0, table.values("running_std"), np.nan
        )
        if np.isnan(running).all() and not self._open:
            return
        self._running.add(running)
        self._given.add(table.values("input_std"))
        value, usual = np.exp(self._running.low), np.exp(self._given.usual)
        told = self._running.valid & (self._running.count > _LEAST)
        active = told & (value > _FAR * usual)
        self.mark(table, "far", active, told, value, usual, role="buffers")
