"""Follows gradients and activations that grow by orders of magnitude over what is usual."""

from __future__ import annotations

import math

import numpy as np

from pytest_modelhealth.training.monitoring.following.follower import Follower
from pytest_modelhealth.training.monitoring.following.levels import Level, Levels, Mask
from pytest_modelhealth.training.monitoring.following.table import Table

_LEAST = 15
_GRADIENTS = math.log(10.0)
_TOTAL = math.log(5.0)
_ACTIVATIONS = math.log(30.0)


class ExplosionFollower(Follower):
    """An episode lasts while the least of the latest values is far above what is usual."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self._gradients, self._activations, self._total = Levels(), Levels(), Level()
        self._big: Mask = np.zeros(0, dtype=bool)
        self._wide: Mask = np.zeros(0, dtype=bool)
        self._is_total_big = False

    def see(self, table: Table) -> None:
        """See the latest step."""
        total = self._total
        total.add(table.row.gradient_norm, held=self._is_total_big)
        self._is_total_big = total.low - total.reference > _TOTAL and total.count > _LEAST
        levels = self._gradients
        levels.add(table.values("parameter_gradient_norm"), self._big)
        above = levels.low - levels.reference
        self._big = (above > _GRADIENTS) & (levels.count > _LEAST)
        active = self._big & self._is_total_big
        self.mark(
            table,
            "gradients",
            active,
            levels.valid,
            np.exp(levels.low),
            np.exp(levels.reference),
            role="parameter_gradients",
        )
        levels = self._activations
        levels.add(table.values("activation_rms"), self._wide)
        above = levels.low - levels.reference
        self._wide = (above > _ACTIVATIONS) & (levels.count > _LEAST)
        self.mark(
            table,
            "activations",
            self._wide,
            levels.valid,
            np.exp(levels.low),
            np.exp(levels.reference),
        )
