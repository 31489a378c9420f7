"""Follows activations and gradients: what grows, fades, dies or saturates."""

from __future__ import annotations

import math
from collections.abc import Iterator

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


def exploding_signals(table: Table, follower: Follower) -> Iterator[None]:
    """An episode lasts while the least of the latest values is far above what is usual."""
    gradients, activations, total = Levels(), Levels(), Level()
    is_big = is_wide = np.zeros(0, dtype=bool)
    is_total_big = False
    growth = _Growth()
    while True:
        total.add(table.row.gradient_norm, held=is_total_big)
        is_total_big = total.low - total.reference > _TOTAL and total.count > _LEAST
        gradients.add(table.values("parameter_gradient_norm"), is_big)
        usual = gradients.reference
        is_big = (gradients.low - usual > _GRADIENTS) & (gradients.count > _LEAST)
        role = "parameter_gradients"
        follower.mark_levels("gradients", is_big & is_total_big, gradients, usual, role=role)
        activations.add(table.values("activation_rms"), is_wide)
        growth.see(table, activations, follower)
        usual = activations.reference
        is_wide = (activations.low - usual > _ACTIVATIONS) & (activations.count > _LEAST)
        follower.mark_levels("activations", is_wide, activations, usual)
        yield


_APART = 1.05
_THEN = 0.6
_MATURE = 60
_LATE = math.log(3.0)
_GREW = math.log(30.0)
_STEADY = 0.3
_JUST = 0.8
_GOES_ON = 0.2


class _Growth:
    """Compares the growth of late with that since the beginning."""

    def __init__(self) -> None:
        self._kept: list[tuple[int, Reals]] = []

    def see(self, table: Table, levels: Levels, follower: Follower) -> None:
        """See the latest step."""
        count, low = table.steps, levels.low
        if not self._kept or count >= _APART * self._kept[-1][0]:
            self._kept.append((count, low))
        latest = next((k for k in reversed(self._kept) if k[0] <= _JUST * count), None)
        while len(self._kept) > 1 and self._kept[1][0] <= _THEN * count:
            self._kept.pop(0)
        then, before = self._kept[0]
        if count < _MATURE or then > _THEN * count or latest is None:
            return
        late, whole = low - grown(before, len(low)), low - levels.opening
        goes_on = low - grown(latest[1], len(low)) > _GOES_ON * late
        active = goes_on & (late > _LATE) & (late > _STEADY * whole) & (whole > _GREW)
        told, start = levels.valid, np.exp(levels.opening)
        facts = {"lately": np.exp(late)}
        follower.mark("growth", active & told, np.exp(low), start, told=told, facts=facts)


_ENOUGH = 16
_DYING_LEAST = 5
_HEALTHY = 0.5
_NOTED = 0.7
_SPREAD = math.log(100.0)
_INPUT = math.log(10.0)
_BEFORE = 15


def dying_layers(table: Table, follower: Follower) -> Iterator[None]:
    """Dead units count where enough values of each were seen, in a layer that once was alive."""
    units, spread, inputs = Levels(), Levels(zeros=True), Levels(zeros=True)
    healthiest = np.zeros(0)
    is_flat: Mask = np.zeros(0, dtype=bool)
    while True:
        dead = table.values("dead_fraction")
        units.add(np.where(table.values("unit_observations") >= _ENOUGH, 1.0 + dead, np.nan))
        least, most = np.exp(units.low) - 1.0, np.exp(units.high) - 1.0
        healthiest = np.fmin(grown(healthiest, len(dead), np.inf), most)
        active = (least > _NOTED) & (healthiest < _HEALTHY) & (units.count > _DYING_LEAST)
        told, since = units.valid, table.lately
        follower.mark("units", active, least, healthiest, told=told, since=since)
        is_finite = ~(table.values("activation_nonfinite") > 0.0)
        spread.add(np.where(is_finite, table.values("activation_std"), np.nan), is_flat)
        inputs.add(table.values("input_std"), is_flat)
        is_flat = (
            (spread.usual - spread.high > _SPREAD)
            & ~(inputs.usual - inputs.low > _INPUT)
            & (spread.count > _BEFORE)
        )
        follower.mark_levels("spread", is_flat, spread, spread.usual, fell=True)
        yield


_FADING_LEAST = 15
_FALL = math.log(100.0)
_OWN_FALL = math.log(30.0)
_HAD = 5
_MISSING = 5
_TINY = math.log(1e6)
_NEVER = 30


def fading_gradients(table: Table, follower: Follower) -> Iterator[None]:
    """Compares a layer's gradients with those of the whole model, and all with what was usual."""
    total, shares, own, relative, without = Level(), Levels(), Levels(), Levels(), Runs()
    has_faded: Mask = np.zeros(0, dtype=bool)
    is_total_faded, zeros, role = False, 0, "parameter_gradients"
    while True:
        norm, values = table.row.gradient_norm, table.values("parameter_gradient_norm")
        total.add(norm, held=is_total_faded)
        zeros = zeros + 1 if norm == 0.0 else 0
        is_total_faded = total.usual - total.high > _FALL and total.count > _FADING_LEAST
        low, usual, told = _exp(total.high), _exp(total.usual), norm == norm
        follower.mark("all_zero", zeros > 1, 0.0, usual, told=told, role="gradients")
        follower.mark("all", is_total_faded, low, usual, told=told, role="gradients", sign=-1)
        if not (math.isfinite(norm) and norm > 0.0):
            yield
            continue
        shares.add(values / norm, has_faded)
        own.add(values, has_faded)
        has_faded = (
            (shares.usual - shares.high > _FALL)
            & (own.usual - own.high > _OWN_FALL)
            & (shares.count > _FADING_LEAST)
        )
        follower.mark_levels("share", has_faded, shares, shares.usual, fell=True, role=role)

        lacks = ~(values > 0.0) & (table.values("trainable_fraction") > 0.0) & (own.count >= _HAD)
        lacks &= ~(table.values("parameter_gradient_nonfinite") > 0.0)
        without.add(lacks, np.ones(len(values), dtype=bool), table.row.step)
        is_cut = without.count >= _MISSING
        if is_cut.any() or follower.open:
            facts = {"is_called": ~np.isnan(table.values("activation_rms"))}
            for kind, active in (("zero", values == 0.0), ("missing", values != 0.0)):
                follower.mark(
                    kind,
                    is_cut & active,
                    0.0,
                    np.exp(own.usual),
                    role=role,
                    since=without.since,
                    rows=without.count,
                    facts=facts,
                )

        is_matrix = table.values("weight_update_ratio") > 0.0
        relative.add(np.where(is_matrix, values / table.values("parameter_norm"), np.nan))
        told_of = relative.valid & (relative.count > _NEVER)
        if told_of.any():
            most = float(np.max(np.where(told_of, relative.low, -np.inf)))
            active = told_of & (most - relative.high > _TINY)
            high = np.exp(relative.high)
            follower.mark("never", active, high, _exp(most), told=told_of, role=role, sign=-1)
        yield


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))


_SATURATING_NOTED = 0.98
_FREE = 0.7


def saturating_layers(table: Table, follower: Follower) -> Iterator[None]:
    """An episode lasts while the least of the latest is near 1, where it began well below."""
    levels = Levels(zeros=True)
    while True:
        values = table.values("saturation")
        told = ~np.isnan(values)
        if told.any() or follower.open:
            levels.add(values)
            low, opening = np.exp(levels.low), np.exp(levels.opening)
            told &= levels.count > OPENING
            active = told & (low > _SATURATING_NOTED) & (opening < _FREE)
            follower.mark("ends", active, low, opening, told=told)
        yield
