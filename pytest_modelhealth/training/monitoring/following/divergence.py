"""Follows a loss that rises above its best, and what the weights do meanwhile."""

from __future__ import annotations

import math

from pytest_modelhealth.training.monitoring.following.follower import Follower
from pytest_modelhealth.training.monitoring.following.levels import Level
from pytest_modelhealth.training.monitoring.following.table import Table

_NOISE = 6.0
_SHARE = 0.5
_SOME = 0.05


class DivergenceFollower(Follower):
    """An episode lasts while the loss is above its best by more than its own noise."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self._updates, self._gradients = Level(), Level()
        self._noise = math.inf
        self._best_step = self._above_since = -1
        self._most = {"update_ratio": 0.0, "update_growth": 0.0, "gradient_growth": 0.0}

    def see(self, table: Table) -> None:
        """See the latest step."""
        row, loss = table.row, table.loss.summary
        is_on = self.is_open("loss")
        self._updates.add(row.update_ratio, held=is_on)
        self._gradients.add(row.gradient_norm, held=is_on)
        if not loss.is_known or row.loss is None:
            return
        if not is_on and (loss.best_step != self._best_step or self._noise > loss.noise):
            self._best_step, self._noise = loss.best_step, loss.noise
        floor = max(_NOISE * self._noise, _SHARE * loss.progress, _SOME * abs(loss.first))
        if row.loss - loss.best <= floor:
            self._above_since = -1
        elif self._above_since < 0:
            self._above_since = row.step
        if loss.lost <= floor:
            self.end("loss")
            self._most = dict.fromkeys(self._most, 0.0)
            return
        self._note_updates()
        self.go_on(
            "loss",
            "",
            row.step,
            loss.recent,
            loss.best,
            role="loss",
            began=self._above_since if self._above_since >= 0 else None,
            facts={
                **self._most,
                "first": loss.first,
                "noise": self._noise,
                "best_step": float(loss.best_step),
            },
        )

    def _note_updates(self) -> None:
        updates, gradients = self._updates, self._gradients
        seen = {
            "update_ratio": math.exp(updates.low),
            "update_growth": math.exp(updates.low - updates.usual),
            "gradient_growth": math.exp(gradients.low - gradients.reference),
        }
        for name, value in seen.items():
            if value > self._most[name]:
                self._most[name] = value
