"""Follows weights that something else than an optimizer changes between steps."""

from __future__ import annotations

import numpy as np

from pytest_modelhealth.training.monitoring.following.follower import Follower
from pytest_modelhealth.training.monitoring.following.levels import grown
from pytest_modelhealth.training.monitoring.following.table import Table

_SHARE = 0.03
_TIMES = 3.0
_QUIET = 20


class MeddlingFollower(Follower):
    """A norm changes by no more than the norm of the update, unless something else writes."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self._norms = np.zeros(0)
        self._updates = np.zeros(0)
        self._quiet = np.zeros(0)
        self._step = -1

    def see(self, table: Table) -> None:
        """See the latest step."""
        row = table.row
        norms = table.values("parameter_norm")
        layers = len(norms)
        before, updates = grown(self._norms, layers), grown(self._updates, layers)
        self._quiet = grown(self._quiet, layers, 0.0)
        if row.step == self._step + 1:
            jump = np.abs(norms - before)
            is_other = (updates > 0.0) & (jump > _TIMES * updates) & (jump > _SHARE * before)
            for at in (is_other & (self._quiet >= _QUIET)).nonzero()[0].tolist():
                self.go_on(
                    "outside",
                    table.layers[at],
                    row.step,
                    float(norms[at]),
                    float(before[at]),
                    role="parameters",
                    facts={"update": float(updates[at])},
                )
            known = updates > 0.0
            self._quiet = np.where(is_other, 0.0, self._quiet + known)
        self._norms, self._step = norms, row.step
        self._updates = table.values("update_norm")
