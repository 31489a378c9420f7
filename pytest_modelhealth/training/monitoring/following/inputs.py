"""Follows what the model is given: inputs that become constant, or change their scale."""

from __future__ import annotations

import math

from pytest_modelhealth.training.monitoring.following.follower import Follower
from pytest_modelhealth.training.monitoring.following.levels import Level
from pytest_modelhealth.training.monitoring.following.table import Table

_LEAST = 15
_SHIFT = math.log(10.0)
_CONSTANT = 1e-6


class InputFollower(Follower):
    """Compares the standard deviation of the model's inputs with what was usual."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self._spread = Level()
        self._is_shifted = False

    def see(self, table: Table) -> None:
        """See the latest step."""
        if "" not in table.row.layers:
            return
        std = table.row["", "input_std"]
        if math.isnan(std):
            return
        spread, step = self._spread, table.row.step
        spread.add(std, held=self._is_shifted)
        usual = math.exp(spread.usual)
        if spread.count >= _LEAST and std < _CONSTANT * usual:
            self.go_on("constant", "", step, std, usual, role="inputs", sign=-1)
            return
        self.end("constant")
        above, below = spread.low - spread.usual, spread.usual - spread.high
        self._is_shifted = spread.count > _LEAST and (above > _SHIFT or below > _SHIFT)
        if self._is_shifted:
            found = spread.low if above > _SHIFT else spread.high
            self.go_on("scale", "", step, math.exp(found), usual, role="inputs")
        else:
            self.end("scale")
