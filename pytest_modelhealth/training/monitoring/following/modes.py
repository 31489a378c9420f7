"""Follows whether layers are in training mode, and how many hooks they have."""

from __future__ import annotations

import numpy as np

from pytest_modelhealth.training.monitoring.following.follower import Follower
from pytest_modelhealth.training.monitoring.following.levels import grown
from pytest_modelhealth.training.monitoring.following.table import Table

_HAD = 5
_RISES = 10


class ModeFollower(Follower):
    """An episode lasts while a layer that was in training mode is in evaluation mode."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self._trained = np.zeros(0)

    def see(self, table: Table) -> None:
        """See the latest step."""
        modes = table.values("training_mode")
        self._trained = grown(self._trained, len(modes), 0.0)
        self._trained += modes == 1.0
        active = (modes == 0.0) & (self._trained >= _HAD)
        told = ~np.isnan(modes)
        self.mark(table, "switched", active, told, modes, self._trained)


class HookFollower(Follower):
    """An episode lasts while a layer has more hooks in every step than in the one before."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self._before = np.zeros(0)
        self._rises = np.zeros(0)

    def see(self, table: Table) -> None:
        """See the latest step."""
        hooks = table.values("hooks")
        self._before = grown(self._before, len(hooks))
        self._rises = grown(self._rises, len(hooks), 0.0)
        told = ~np.isnan(hooks)
        self._rises = np.where(hooks > self._before, self._rises + 1.0, self._rises * ~told)
        active = self._rises >= _RISES
        self.mark(table, "rising", active, told, hooks, self._before)
        self._before = np.where(told, hooks, self._before)
