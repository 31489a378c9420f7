"""Follows weights: updates, sizes, what stands still and what something else writes."""

from __future__ import annotations

import math
from collections.abc import Iterator

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

_NOTED = 0.01
_WARM_UP = 10
_MOVED = 5
_STILL = 5


def update_ratio(table: Table, follower: Follower) -> Iterator[None]:
    """An episode lasts while the least of the latest ratios is large."""
    ratios = Levels()
    while True:
        ratios.add(table.values("weight_update_ratio"))
        active = (np.exp(ratios.low) > _NOTED) & (ratios.count > _WARM_UP)
        follower.mark_levels("large", active, ratios, ratios.usual)
        yield


def stopped_updates(table: Table, follower: Follower) -> Iterator[None]:
    """An episode lasts while a layer that moved stands still, though it has gradients."""
    has_matrix: Mask = np.zeros(0, dtype=bool)
    moved, still = np.zeros(0), Runs()
    while True:
        if not table.row.update_ratio > 0.0:
            yield
            continue
        updates, weights = table.values("update_norm"), table.values("weight_update_ratio")
        has_matrix = grown(has_matrix, len(updates), False) | (weights > 0.0)
        updates = np.where(has_matrix, weights, updates)
        moved = grown(moved, len(updates), 0.0) + (updates > 0.0)
        has_moved, rates = moved >= _MOVED, table.values("learning_rate")
        has_gradients = table.values("parameter_gradient_norm") > 0.0
        trainable = table.values("trainable_fraction")
        stands = (updates == 0.0) & has_gradients & has_moved & ~(rates == 0.0)
        left_out = np.isnan(updates) & has_gradients & has_moved & (trainable > 0.0)
        rests = has_moved & ~(updates > 0.0)  # on purpose, it seems
        told = ~np.isnan(trainable)
        follower.mark("frozen", rests & (trainable == 0.0), 0.0, moved, told=told)
        active = rests & (rates == 0.0) & (trainable > 0.0)
        follower.mark("rate_zero", active, 0.0, moved, told=~np.isnan(rates))
        lacks = stands | left_out
        told = lacks | (updates > 0.0) | (rates == 0.0)
        still.add(lacks, told, table.row.step)
        if lacks.any() or follower.open:
            noted, since, rows = still.count >= _STILL, still.since, still.count
            for kind, active in (("zero", stands & noted), ("left_out", left_out & noted)):
                follower.mark(kind, active, 0.0, moved, told=told, since=since, rows=rows)
        yield


_SMALL = 0.01
_GROWN = 10.0
_SHRUNK = 0.1


def weight_drift(table: Table, follower: Follower) -> Iterator[None]:
    """Compares the size of weights with that at the beginning, and with the largest so far."""
    levels, first, largest = Levels(zeros=True), np.zeros(0), np.zeros(0)
    while True:
        sizes = table.values("parameter_rms")
        levels.add(sizes)
        first = grown(first, len(sizes))
        first = np.where(np.isnan(first), sizes, first)
        low, high = np.exp(levels.low), np.exp(levels.high)
        largest = np.fmax(grown(largest, len(sizes), 0.0), low)
        told = levels.valid & (levels.count >= LATELY)
        start = np.maximum(first, _SMALL)
        active = told & (low / start > _GROWN) & (low > 1.0)
        follower.mark("growth", active, low, start, told=told)
        active = told & (high / largest < _SHRUNK)
        follower.mark("shrinking", active, high, largest, told=told, sign=-1)
        yield


_SHARE = 0.03
_TIMES = 3.0
_QUIET = 20


def outside_changes(table: Table, follower: Follower) -> Iterator[None]:
    """A norm changes by no more than the norm of the update, unless something else writes."""
    before = updates = quiet = np.zeros(0)
    step = -1
    while True:
        norms = table.values("parameter_norm")
        before, updates = grown(before, len(norms)), grown(updates, len(norms))
        quiet = grown(quiet, len(norms), 0.0)
        if table.row.step == step + 1:
            jump = np.abs(norms - before)
            is_other = (updates > 0.0) & (jump > _TIMES * updates) & (jump > _SHARE * before)
            active, facts = is_other & (quiet >= _QUIET), {"update": updates}
            follower.mark("outside", active, norms, before, told=False, facts=facts)
            quiet = np.where(is_other, 0.0, quiet + (updates > 0.0))
        before, step = norms, table.row.step
        updates = table.values("update_norm")
        yield


_EARLY, _SLOW = 30, 30
_RARELY, _OFTEN = 0.2, 0.3
_ULP = 1e-8
"""Less than half of the last digit of float32, by the value itself."""


def standstill(table: Table, follower: Follower) -> Iterator[None]:
    """Each of its episodes began with the training, and ends with the first change."""
    before, is_still, is_without = math.nan, True, True
    stop, idle = _Pause(), _Pause()
    counted, lately, early = 0, 0.0, 0.0
    while True:
        row, loss = table.row, table.loss.summary
        norms = float(row.values["parameter_norm"][row.values["parameter_norm"] > 0.0].sum())
        is_same = norms == before and not row.update_ratio > 0.0
        is_next_to_same = abs(norms - before) <= _ULP * norms and not row.update_ratio > _ULP
        before = norms
        has_gradients = row.gradient_norm > 0.0 or math.isinf(row.gradient_norm)
        flows = has_gradients or bool((row.values["gradient_norm"] > 0.0).any())
        is_still &= is_same or table.steps == 1
        is_without &= not has_gradients
        first, rows = loss.first, table.steps
        follower.mark("weights", is_still and not is_without, norms, first, rows=rows)
        is_cut = is_without and row.passes > 0
        follower.mark("gradients", is_cut, row.gradient_norm, first, rows=rows)

        if flows and math.isfinite(row.gradient_norm):  # how often an optimizer steps: the mean
            counted += 1
            lately += (float(row.optimizer_steps > 0) - lately) / min(counted, _SLOW)
            early = lately if counted == _EARLY else early
            is_rare = counted > _EARLY and lately < _RARELY and early > _OFTEN
            follower.mark("rare", is_rare, lately, early, told=lately > _OFTEN, sign=-1)

        rates = row.values["learning_rate"]
        rates = rates[rates == rates]
        is_told = row.gradient_norm == row.gradient_norm or row.update_ratio > 0.0
        stop.see(
            "stopped",
            is_next_to_same and flows and not is_still,
            table,
            follower,
            is_told=is_told,
            ends=row.update_ratio > _ULP,
            facts={"rate": float(rates.max()) if len(rates) else math.nan},
        )
        rests = is_same and has_gradients and not row.optimizer_steps and not is_still
        idle.see("idle", rests, table, follower, ends=row.optimizer_steps > 0)
        is_flat = loss.is_known and loss.is_flat
        follower.mark("loss", is_flat, loss.recent, first, role="loss", rows=rows)
        yield


class _Pause:
    """Counts steps in a row in which nothing happened, after some in which something did."""

    _count = _longest = _since = 0

    def see(
        self,
        kind: str,
        goes_on: bool,
        table: Table,
        follower: Follower,
        *,
        ends: bool,
        is_told: bool = True,
        facts: dict[str, float] | None = None,
    ) -> None:
        """See the latest step.

        Args:
            kind: that of its episodes.
            goes_on: whether nothing happened.
            table, follower: the steps, and who says what goes on.
            ends: whether something certainly did.
            is_told: whether the step tells.
            facts: what else was measured.
        """
        if goes_on:
            if not self._count:
                self._since = table.row.step
            self._count += 1
        else:
            if ends:
                self._longest = max(self._longest, self._count)
            if is_told:
                self._count = 0
        count, longest, since = self._count, self._longest, self._since
        follower.mark(
            kind, goes_on, count, longest, told=is_told, since=since, rows=count, facts=facts
        )
