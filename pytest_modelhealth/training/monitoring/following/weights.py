"""Follows weights: updates, sizes, what stands still and what something else writes."""

from __future__ import annotations

import math

import numpy as np

from pytest_modelhealth.training.monitoring.following.follower import (
    LATELY,
    Follower,
    Levels,
    Mask,
    Runs,
    Table,
    grown,
)
from pytest_modelhealth.training.monitoring.row import Reals, StepRow

_NOTED = 0.01
_WARM_UP = 10
_MOVED = 5
_STILL = 5


class RatioFollower(Follower):
    """An episode lasts while the least of the latest ratios is large."""

    role = "parameters"

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self._ratios = Levels()

    def see(self, table: Table) -> None:
        """See the latest step."""
        levels = self._ratios
        levels.add(table.values("weight_update_ratio"))
        active = (np.exp(levels.low) > _NOTED) & (levels.count > _WARM_UP)
        self.mark_levels("large", active, levels, levels.usual)


class StillFollower(Follower):
    """An episode lasts while a layer that moved stands still, though it has gradients."""

    role = "parameters"
    _has_matrix: Mask = np.zeros(0, dtype=bool)
    _moved: Reals = np.zeros(0)

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self._still = Runs()

    def see(self, table: Table) -> None:
        """See the latest step."""
        if not table.row.update_ratio > 0.0:
            return
        updates, weights = table.values("update_norm"), table.values("weight_update_ratio")
        layers = len(updates)
        self._has_matrix = grown(self._has_matrix, layers, False) | (weights > 0.0)
        updates = np.where(self._has_matrix, weights, updates)
        self._moved = grown(self._moved, layers, 0.0)
        self._moved += updates > 0.0
        rates = table.values("learning_rate")
        has_gradients = table.values("parameter_gradient_norm") > 0.0
        stands = (updates == 0.0) & has_gradients & (self._moved >= _MOVED) & ~(rates == 0.0)
        left_out = np.isnan(updates) & has_gradients & (self._moved >= _MOVED)
        trainable = table.values("trainable_fraction")
        left_out &= trainable > 0.0
        is_held = (self._moved >= _MOVED) & ~(updates > 0.0)
        zero, held = np.zeros(layers), is_held & (trainable == 0.0)  # held on purpose, it seems
        self.mark("frozen", held, ~np.isnan(trainable), zero, self._moved)
        held = is_held & (rates == 0.0) & (trainable > 0.0)
        self.mark("rate_zero", held, ~np.isnan(rates), zero, self._moved)
        lacks = stands | left_out
        told = lacks | (updates > 0.0) | (rates == 0.0)
        still = self._still
        still.add(lacks, told, table.row.step)
        if not (lacks.any() or self._open):
            return
        noted = still.count >= _STILL
        for kind, active in (("zero", stands & noted), ("left_out", left_out & noted)):
            self.mark(kind, active, told, zero, self._moved, began=still.since, rows=still.count)


_SMALL = 0.01
_GROWN = 10.0
_SHRUNK = 0.1


class DriftFollower(Follower):
    """Compares the size of weights with that at the beginning, and with the largest so far."""

    role = "parameters"

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self._sizes = Levels(zeros=True)
        self._first = np.zeros(0)
        self._largest = np.zeros(0)

    def see(self, table: Table) -> None:
        """See the latest step."""
        sizes = table.values("parameter_rms")
        layers = len(sizes)
        levels = self._sizes
        levels.add(sizes)
        self._first = grown(self._first, layers)
        self._first = np.where(np.isnan(self._first), sizes, self._first)
        low, high = np.exp(levels.low), np.exp(levels.high)
        self._largest = np.fmax(grown(self._largest, layers, 0.0), low)
        told = levels.valid & (levels.count >= LATELY)
        start = np.maximum(self._first, _SMALL)
        growth = low / start
        left = high / self._largest
        active = told & (growth > _GROWN) & (low > 1.0)
        self.mark("growth", active, told, low, start)
        active = told & (left < _SHRUNK)
        largest = self._largest
        self.mark("shrinking", active, told, high, largest, sign=-1)


_SHARE = 0.03
_TIMES = 3.0
_QUIET = 20


class MeddlingFollower(Follower):
    """A norm changes by no more than the norm of the update, unless something else writes."""

    role = "parameters"
    _norms: Reals = np.zeros(0)
    _updates: Reals = np.zeros(0)
    _quiet: Reals = np.zeros(0)
    _step = -1

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
            active, never = is_other & (self._quiet >= _QUIET), np.zeros(layers, dtype=bool)
            self.mark("outside", active, never, norms, before, facts={"update": updates})
            known = updates > 0.0
            self._quiet = np.where(is_other, 0.0, self._quiet + known)
        self._norms, self._step = norms, row.step
        self._updates = table.values("update_norm")


_EARLY, _SLOW = 30, 30
_RARELY, _OFTEN = 0.2, 0.3
_ULP = 1e-8
"""Less than half of the last digit of float32, by the value itself."""


class StandingFollower(Follower):
    """Each of its episodes began with the training, and ends with the first change."""

    role = "parameters"
    _norms = math.nan
    _is_still = _is_without = True
    _idle = _longest = 0
    _idle_since = 0
    _counted, _lately, _early = 0, 0.0, 0.0
    _stop = _longest_stop = _stop_since = 0

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
            float(self._stop),
            float(self._longest_stop),
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
            self.go_on("rare", "", self._lately, self._early, sign=-1)
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
            float(self._idle),
            float(self._longest),
            began=self._idle_since,
            rows=self._idle,
        )

    def _say(self, kind: str, is_on: bool, table: Table, value: float) -> None:
        if not is_on:
            self.end(kind)
            return
        role = "loss" if kind == "loss" else "parameters"
        first = table.loss.summary.first
        self.go_on(kind, "", value, first, role=role, rows=table.steps)
