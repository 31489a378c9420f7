"""Follows gradients that fall to next to nothing, in a layer or in all, and those that are cut."""

from __future__ import annotations

import math

import numpy as np

from pytest_modelhealth.training.monitoring.following.follower import Follower
from pytest_modelhealth.training.monitoring.following.levels import Level, Levels, Mask, grown
from pytest_modelhealth.training.monitoring.following.table import Table
from pytest_modelhealth.training.monitoring.row import Reals

_LEAST = 15
_FALL = math.log(100.0)
_OWN_FALL = math.log(30.0)
_HAD = 5
_MISSING = 5
_TINY = math.log(1e6)
_NEVER = 30


class FadingFollower(Follower):
    """Compares a layer's gradients with those of the whole model, and all with what was usual."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self._shares, self._own, self._total = Levels(), Levels(), Level()
        self._relative = Levels()
        self._faded: Mask = np.zeros(0, dtype=bool)
        self._is_total_faded = False
        self._without = np.zeros(0)
        self._since = np.zeros(0)
        self._all_zero = 0

    def see(self, table: Table) -> None:
        """See the latest step."""
        total = table.row.gradient_norm
        values = table.values("parameter_gradient_norm")
        self._see_all(table, total)
        if not (math.isfinite(total) and total > 0.0):
            return
        self._see_shares(table, values, total)
        self._see_cuts(table, values)
        self._see_never(table, values)

    def _see_all(self, table: Table, norm: float) -> None:
        total, row = self._total, table.row
        total.add(norm, held=self._is_total_faded)
        self._all_zero = self._all_zero + 1 if norm == 0.0 else 0
        if self._all_zero > 1:
            self.go_on("all_zero", "", row.step, 0.0, _exp(total.usual), role="gradients")
        elif norm == norm:
            self.end("all_zero")
        below = total.usual - total.high
        self._is_total_faded = below > _FALL and total.count > _LEAST
        if self._is_total_faded:
            found = _exp(total.high)
            usual = _exp(total.usual)
            self.go_on("all", "", row.step, found, usual, role="gradients", sign=-1)
        elif norm == norm:
            self.end("all")

    def _see_shares(self, table: Table, values: Reals, total: float) -> None:
        shares, own = self._shares, self._own
        shares.add(values / total, self._faded)
        own.add(values, self._faded)
        self._faded = (
            (shares.usual - shares.high > _FALL)
            & (own.usual - own.high > _OWN_FALL)
            & (shares.count > _LEAST)
        )
        self.mark(
            table,
            "share",
            self._faded,
            shares.valid,
            np.exp(shares.high),
            np.exp(shares.usual),
            role="parameter_gradients",
            sign=-1,
        )

    def _see_cuts(self, table: Table, values: Reals) -> None:
        layers = len(values)
        self._without = grown(self._without, layers, 0.0)
        self._since = grown(self._since, layers, 0.0)
        trainable = table.values("trainable_fraction") > 0.0
        lacks = ~(values > 0.0) & trainable & (self._own.count >= _HAD)
        lacks &= ~(table.values("parameter_gradient_nonfinite") > 0.0)
        self._since[lacks & (self._without == 0.0)] = table.row.step
        self._without = np.where(lacks, self._without + 1.0, 0.0)
        is_cut = self._without >= _MISSING
        if not is_cut.any() and not self._open:
            return
        usual = np.exp(self._own.usual)
        called = ~np.isnan(table.values("activation_rms"))
        is_zero = values == 0.0
        for kind, active in (("zero", is_cut & is_zero), ("missing", is_cut & ~is_zero)):
            for at in active.nonzero()[0].tolist():
                self.go_on(
                    kind,
                    table.layers[at],
                    table.row.step,
                    0.0,
                    float(usual[at]),
                    role="parameter_gradients",
                    began=int(self._since[at]),
                    rows=int(self._without[at]),
                    facts={"is_called": float(called[at])},
                )
            for own, layer in list(self._open):
                if own == kind and not active[table.column(layer)]:
                    self.end(kind, layer)

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
            table,
            "never",
            active,
            told,
            np.exp(levels.high),
            np.full(len(values), _exp(most)),
            role="parameter_gradients",
            sign=-1,
        )


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))
