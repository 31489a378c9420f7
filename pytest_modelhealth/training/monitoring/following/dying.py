"""Follows units that die, and outputs that become constant."""

from __future__ import annotations

import math

import numpy as np

from pytest_modelhealth.training.monitoring.following.follower import Follower
from pytest_modelhealth.training.monitoring.following.levels import Levels, Mask, grown
from pytest_modelhealth.training.monitoring.following.table import Table

_ENOUGH = 16
_LEAST = 5
_HEALTHY = 0.5
_NOTED = 0.7
_SPREAD = math.log(100.0)
_INPUT = math.log(10.0)
_BEFORE = 15


class DyingFollower(Follower):
    """Dead units count where enough values of each were seen, in a layer that once was alive."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self._dead = Levels()
        self._least = np.zeros(0)
        self._spread, self._inputs = Levels(zeros=True), Levels(zeros=True)
        self._flat: Mask = np.zeros(0, dtype=bool)

    def see(self, table: Table) -> None:
        """See the latest step."""
        self._see_units(table)
        self._see_spread(table)

    def _see_units(self, table: Table) -> None:
        dead = table.values("dead_fraction")
        alive = np.where(table.values("unit_observations") >= _ENOUGH, 1.0 + dead, np.nan)
        levels = self._dead
        levels.add(alive)
        least, most = np.exp(levels.low) - 1.0, np.exp(levels.high) - 1.0
        self._least = np.fmin(grown(self._least, len(dead), np.inf), most)
        active = (least > _NOTED) & (self._least < _HEALTHY) & (levels.count > _LEAST)
        self.mark(table, "units", active, levels.valid, least, self._least, lately=True)

    def _see_spread(self, table: Table) -> None:
        spread, inputs = self._spread, self._inputs
        stds = table.values("activation_std")
        stds = np.where(table.values("activation_nonfinite") > 0.0, np.nan, stds)
        spread.add(stds, self._flat)
        inputs.add(table.values("input_std"), self._flat)
        self._flat = (
            (spread.usual - spread.high > _SPREAD)
            & ~(inputs.usual - inputs.low > _INPUT)
            & (spread.count > _BEFORE)
        )
        self.mark(
            table,
            "spread",
            self._flat,
            spread.valid,
            np.exp(spread.high),
            np.exp(spread.usual),
            sign=-1,
            lately=True,
        )
