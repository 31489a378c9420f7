"""Follows gradients and activations that grow by orders of magnitude over what is usual."""

from __future__ import annotations

import math

import numpy as np

from pytest_modelhealth.training.monitoring.following.follower import Follower
from pytest_modelhealth.training.monitoring.following.levels import Level, Levels, Mask, grown
from pytest_modelhealth.training.monitoring.following.table import Table
from pytest_modelhealth.training.monitoring.row import Reals

_LEAST = 15
_GRADIENTS = math.log(10.0)
_TOTAL = math.log(5.0)
_ACTIVATIONS = math.log(30.0)
_APART = 1.05
_THEN = 0.6
_MATURE = 60
_LATE = math.log(3.0)
_GREW = math.log(30.0)
_STEADY = 0.3
_JUST = 0.8
_GOES_ON = 0.2


class ExplosionFollower(Follower):
    """An episode lasts while the least of the latest values is far above what is usual."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self._gradients, self._activations, self._total = Levels(), Levels(), Level()
        self._big: Mask = np.zeros(0, dtype=bool)
        self._wide: Mask = np.zeros(0, dtype=bool)
        self._is_total_big = False
        self._kept: list[tuple[int, Reals]] = []

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
            lately=True,
        )
        levels = self._activations
        levels.add(table.values("activation_rms"), self._wide)
        self._see_growth(table, levels)
        above = levels.low - levels.reference
        self._wide = (above > _ACTIVATIONS) & (levels.count > _LEAST)
        self.mark(
            table,
            "activations",
            self._wide,
            levels.valid,
            np.exp(levels.low),
            np.exp(levels.reference),
            lately=True,
        )

    def _see_growth(self, table: Table, levels: Levels) -> None:
        """Compare the growth of late with that since the beginning."""
        count, layers = table.steps, len(levels.low)
        if not self._kept or count >= _APART * self._kept[-1][0]:
            self._kept.append((count, levels.low))
        latest = next((k for k in reversed(self._kept) if k[0] <= _JUST * count), None)
        while len(self._kept) > 1 and self._kept[1][0] <= _THEN * count:
            self._kept.pop(0)
        then, before = self._kept[0]
        if count < _MATURE or then > _THEN * count or latest is None:
            return
        low = levels.low
        late = low - grown(before, layers)
        whole = low - levels.opening
        goes_on = low - grown(latest[1], layers) > _GOES_ON * late
        active = goes_on & (late > _LATE) & (late > _STEADY * whole) & (whole > _GREW)
        told = levels.valid
        self.mark(
            table,
            "growth",
            active & told,
            told,
            np.exp(low),
            np.exp(levels.opening),
            facts={"lately": np.exp(late)},
        )
