"""Follows activations and gradients: what grows, fades, dies or saturates."""

from __future__ import annotations

import math

import numpy as np

from pytest_modelhealth.training.monitoring.following.follower import (
    OPENING,
    Follower,
    Level,
    Levels,
    Mask,
    Runs,
    Table,
    grown,
)
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
        role = "parameter_gradients"
        self.mark_levels("gradients", active, levels, levels.reference, role=role)
        levels = self._activations
        levels.add(table.values("activation_rms"), self._wide)
        self._see_growth(table, levels)
        above = levels.low - levels.reference
        self._wide = (above > _ACTIVATIONS) & (levels.count > _LEAST)
        self.mark_levels("activations", self._wide, levels, levels.reference)

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
            "growth",
            active & told,
            told,
            np.exp(low),
            np.exp(levels.opening),
            facts={"lately": np.exp(late)},
        )


_ENOUGH = 16
_DYING_LEAST = 5
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
        active = (least > _NOTED) & (self._least < _HEALTHY) & (levels.count > _DYING_LEAST)
        since = np.full(len(dead), table.lately)
        self.mark("units", active, levels.valid, least, self._least, began=since)

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
        self.mark_levels("spread", self._flat, spread, spread.usual, fell=True)


_FADING_LEAST = 15
_FALL = math.log(100.0)
_OWN_FALL = math.log(30.0)
_HAD = 5
_MISSING = 5
_TINY = math.log(1e6)
_NEVER = 30


class FadingFollower(Follower):
    """Compares a layer's gradients with those of the whole model, and all with what was usual."""

    role = "parameter_gradients"

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self._shares, self._own, self._total = Levels(), Levels(), Level()
        self._relative = Levels()
        self._faded: Mask = np.zeros(0, dtype=bool)
        self._is_total_faded = False
        self._without = Runs()
        self._all_zero = 0

    def see(self, table: Table) -> None:
        """See the latest step."""
        total = table.row.gradient_norm
        values = table.values("parameter_gradient_norm")
        self._see_all(total)
        if not (math.isfinite(total) and total > 0.0):
            return
        self._see_shares(table, values, total)
        self._see_cuts(table, values)
        self._see_never(table, values)

    def _see_all(self, norm: float) -> None:
        total = self._total
        total.add(norm, held=self._is_total_faded)
        self._all_zero = self._all_zero + 1 if norm == 0.0 else 0
        if self._all_zero > 1:
            self.go_on("all_zero", "", 0.0, _exp(total.usual), role="gradients")
        elif norm == norm:
            self.end("all_zero")
        below = total.usual - total.high
        self._is_total_faded = below > _FALL and total.count > _FADING_LEAST
        if self._is_total_faded:
            found = _exp(total.high)
            usual = _exp(total.usual)
            self.go_on("all", "", found, usual, role="gradients", sign=-1)
        elif norm == norm:
            self.end("all")

    def _see_shares(self, table: Table, values: Reals, total: float) -> None:
        shares, own = self._shares, self._own
        shares.add(values / total, self._faded)
        own.add(values, self._faded)
        self._faded = (
            (shares.usual - shares.high > _FALL)
            & (own.usual - own.high > _OWN_FALL)
            & (shares.count > _FADING_LEAST)
        )
        self.mark_levels("share", self._faded, shares, shares.usual, fell=True)

    def _see_cuts(self, table: Table, values: Reals) -> None:
        layers = len(values)
        every = np.ones(layers, dtype=bool)
        trainable = table.values("trainable_fraction") > 0.0
        lacks = ~(values > 0.0) & trainable & (self._own.count >= _HAD)
        lacks &= ~(table.values("parameter_gradient_nonfinite") > 0.0)
        without = self._without
        without.add(lacks, every, table.row.step)
        is_cut = without.count >= _MISSING
        if not is_cut.any() and not self._open:
            return
        usual = np.exp(self._own.usual)
        called = ~np.isnan(table.values("activation_rms"))
        is_zero = values == 0.0
        for kind, active in (("zero", is_cut & is_zero), ("missing", is_cut & ~is_zero)):
            self.mark(
                kind,
                active,
                every,
                np.zeros(layers),
                usual,
                began=without.since,
                rows=without.count,
                facts={"is_called": called},
            )

    def _see_never(self, table: Table, values: Reals) -> None:
        held = table.values("parameter_norm")
        matrices = table.values("weight_update_ratio") > 0.0
        relative = np.where(matrices, values / held, np.nan)
        levels = self._relative
        levels.add(relative)
        told = levels.valid & (levels.count > _NEVER)
        if not told.any():
            return
        most = float(np.max(np.where(told, levels.low, -np.inf)))
        active = told & (most - levels.high > _TINY)
        self.mark(
            "never", active, told, np.exp(levels.high), np.full(len(values), _exp(most)), sign=-1
        )


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))


_SATURATING_NOTED = 0.98
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
        active = told & (low > _SATURATING_NOTED) & (opening < _FREE)
        self.mark("ends", active, told, low, opening)
