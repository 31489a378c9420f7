"""Follows whether anything changes at all: weights, gradients, the loss."""

from __future__ import annotations

import math

from pytest_modelhealth.training.monitoring.following.follower import Follower
from pytest_modelhealth.training.monitoring.following.table import Table
from pytest_modelhealth.training.monitoring.row import StepRow

_EARLY, _SLOW = 30, 30
_RARELY, _OFTEN = 0.2, 0.3
_ULP = 1e-8
"""Less than half of the last digit of float32, by the value itself."""


class StandingFollower(Follower):
    """Each of its episodes began with the training, and ends with the first change."""

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self._norms = math.nan
        self._is_still = self._is_without = True
        self._idle = self._longest = 0
        self._idle_since = 0
        self._counted, self._lately, self._early = 0, 0.0, 0.0
        self._stop = self._longest_stop = self._stop_since = 0

    def see(self, table: Table) -> None:
        """See the latest step."""
        row = table.row
        norms = float(row.values["parameter_norm"][row.values["parameter_norm"] > 0.0].sum())
        is_same = norms == self._norms and not row.update_ratio > 0.0
        is_next_to_same = abs(norms - self._norms) <= _ULP * norms and not row.update_ratio > _ULP
        self._is_still &= is_same or table.steps == 1
        self._norms = norms
        has_gradients = row.gradient_norm > 0.0 or math.isinf(row.gradient_norm)
        flows = has_gradients or bool((row.values["gradient_norm"] > 0.0).any())
        self._is_without &= not has_gradients
        self._say("weights", self._is_still and not self._is_without, table, norms)
        self._say("gradients", self._is_without and row.passes > 0, table, row.gradient_norm)
        self._see_rate(table, row, flows)
        self._see_stop(table, is_next_to_same and flows, row)
        self._see_idle(table, is_same and has_gradients and not row.optimizer_steps)
        loss = table.loss.summary
        is_flat = loss.is_known and loss.is_flat
        self._say("loss", is_flat, table, loss.recent if is_flat else 0.0)

    def _see_stop(self, table: Table, is_still: bool, row: StepRow) -> None:
        """Count steps in a row in which nothing changed, after some in which something did."""
        if not is_still or self._is_still:
            if row.update_ratio > _ULP:
                self._longest_stop = max(self._longest_stop, self._stop)
            if row.gradient_norm == row.gradient_norm or row.update_ratio > 0.0:
                self._stop = 0
                self.end("stopped")
            return
        if not self._stop:
            self._stop_since = row.step
        self._stop += 1
        rates = row.values["learning_rate"]
        rates = rates[rates == rates]
        self.go_on(
            "stopped",
            "",
            row.step,
            float(self._stop),
            float(self._longest_stop),
            role="parameters",
            began=self._stop_since,
            rows=self._stop,
            facts={"rate": float(rates.max()) if len(rates) else math.nan},
        )

    def _see_rate(self, table: Table, row: StepRow, flows: bool) -> None:
        """Average how often an optimizer steps: at the beginning, and lately."""
        if not flows or not math.isfinite(row.gradient_norm):
            return
        self._counted += 1
        steps = float(row.optimizer_steps > 0)
        self._lately += (steps - self._lately) / min(self._counted, _SLOW)
        if self._counted == _EARLY:
            self._early = self._lately
        if self._counted > _EARLY and self._lately < _RARELY and self._early > _OFTEN:
            self.go_on("rare", "", row.step, self._lately, self._early, role="parameters", sign=-1)
        elif self._lately > _OFTEN:
            self.end("rare")

    def _see_idle(self, table: Table, is_idle: bool) -> None:
        """Count steps in a row that no optimizer takes, after some that one took."""
        if not is_idle or self._is_still:
            if table.row.optimizer_steps:
                self._longest = max(self._longest, self._idle)
            self._idle = 0
            self.end("idle")
            return
        if not self._idle:
            self._idle_since = table.row.step
        self._idle += 1
        self.go_on(
            "idle",
            "",
            table.row.step,
            float(self._idle),
            float(self._longest),
            role="parameters",
            began=self._idle_since,
            rows=self._idle,
        )

    def _say(self, kind: str, is_on: bool, table: Table, value: float) -> None:
        if not is_on:
            self.end(kind)
            return
        role = "loss" if kind == "loss" else "parameters"
        first = table.loss.summary.first
        self.go_on(kind, "", table.row.step, value, first, role=role, rows=table.steps)
