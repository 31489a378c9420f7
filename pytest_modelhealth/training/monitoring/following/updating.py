"""Follows what optimizers do to weights: updates that stay large, and those that stop."""

from __future__ import annotations

import numpy as np

from pytest_modelhealth.training.monitoring.following.follower import Follower
from pytest_modelhealth.training.monitoring.following.levels import Levels, Mask, grown, held_of
from pytest_modelhealth.training.monitoring.following.table import Table

_NOTED = 0.01
_WARM_UP = 10
_MOVED = 5
_STILL = 5


class RatioFollower(Follower):
    """An episode lasts while the least of the latest ratios is large."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self._ratios = Levels()

    def see(self, table: Table) -> None:
        """See the latest step."""
        levels = self._ratios
        levels.add(table.values("weight_update_ratio"))
        low = np.exp(levels.low)
        active = (low > _NOTED) & (levels.count > _WARM_UP)
        self.mark(
            table,
            "large",
            active,
            levels.valid,
            low,
            np.exp(levels.usual),
            role="parameters",
            lately=True,
        )


class StillFollower(Follower):
    """An episode lasts while a layer that moved stands still, though it has gradients."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self._has_matrix: Mask = np.zeros(0, dtype=bool)
        self._moved = np.zeros(0)
        self._still = np.zeros(0)
        self._since = np.zeros(0)

    def see(self, table: Table) -> None:
        """See the latest step."""
        if not table.row.update_ratio > 0.0:
            return
        updates, weights = table.values("update_norm"), table.values("weight_update_ratio")
        layers = len(updates)
        self._has_matrix = held_of(self._has_matrix, layers) | (weights > 0.0)
        updates = np.where(self._has_matrix, weights, updates)
        self._moved = grown(self._moved, layers, 0.0)
        self._still = grown(self._still, layers, 0.0)
        self._since = grown(self._since, layers, 0.0)
        self._moved += updates > 0.0
        rates = table.values("learning_rate")
        has_gradients = table.values("parameter_gradient_norm") > 0.0
        stands = (updates == 0.0) & has_gradients & (self._moved >= _MOVED) & ~(rates == 0.0)
        left_out = np.isnan(updates) & has_gradients & (self._moved >= _MOVED)
        trainable = table.values("trainable_fraction")
        left_out &= trainable > 0.0
        is_held = (self._moved >= _MOVED) & ~(updates > 0.0)
        self._see_said(table, "frozen", is_held & (trainable == 0.0), ~np.isnan(trainable))
        self._see_said(
            table, "rate_zero", is_held & (rates == 0.0) & (trainable > 0.0), ~np.isnan(rates)
        )
        lacks = stands | left_out
        self._since[lacks & (self._still == 0.0)] = table.row.step
        told = lacks | (updates > 0.0) | (rates == 0.0)
        self._still = np.where(lacks, self._still + 1.0, np.where(told, 0.0, self._still))
        if not (lacks.any() or self._open):
            return
        noted = self._still >= _STILL
        for kind, active in (("zero", stands & noted), ("left_out", left_out & noted)):
            for at in active.nonzero()[0].tolist():
                self.go_on(
                    kind,
                    table.layers[at],
                    table.row.step,
                    0.0,
                    float(self._moved[at]),
                    role="parameters",
                    began=int(self._since[at]),
                    rows=int(self._still[at]),
                    facts={"rate": float(rates[at])},
                )
            for own, layer in list(self._open):
                at = table.column(layer)
                if own == kind and told[at] and not active[at]:
                    self.end(kind, layer)

    def _see_said(self, table: Table, kind: str, active: Mask, told: Mask) -> None:
        """Note layers that are held on purpose, as far as anybody can tell."""
        zero = np.zeros(len(active))
        self.mark(table, kind, active, told, zero, self._moved, role="parameters")
