"""Rules for activations and gradients of layers: what grows, dies, fades or saturates.

A rule is a table of what is wrong, over a generator that looks at each step and marks what goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from pytest_modelhealth.report import Course, CourseEvent
from pytest_modelhealth.settings import Severity
from pytest_modelhealth.training.monitoring.course import Follower, Table
from pytest_modelhealth.training.monitoring.levels import OPENING, Levels, Runs
from pytest_modelhealth.training.monitoring.rule import Kind, by_loss, rule

_HUGE = 1e4  # activations below are in range, whatever they began at
_CERTAIN = 1e6


def _exploded(event: CourseEvent, course: Course) -> Severity | None:
    if event.kind == "gradients" and event.value > _CERTAIN * event.reference:
        return "fail"  # whatever the loss says
    if event.kind == "gradients" or event.value >= _HUGE:
        return by_loss(event, course)
    return "warn" if course.loss.is_known and not course.loss.is_well else None


_ROSE = " of {layer} grew from {reference:.3g} to {value:.3g}, and stays there since step {step}"
_rising = partial(
    Kind,
    cause="steps are too large for this layer, and nothing bounds what it makes",
    measure="change",
    grade=_exploded,
)


@rule(
    _rising("gradients", "the gradient norm" + _ROSE, limit="max_gradient_rise"),
    _rising("activations", "the activations (rms)" + _ROSE, limit="max_activation_rise"),
    Kind(
        "growth",
        "the activations (rms) of {layer} grow exponentially: from {reference:.3g} to {value:.3g}, "
        "and {lately:.3g}-fold in the last two fifths of the training",
        "a gain, a scale or a reward of size is multiplied or rewarded without a bound",
        "change",
        grade=lambda e, _: "fail" if e.value > max(100.0 * e.reference, 10.0) else None,
    ),
    Kind(
        "piled",
        "gradients add up over the training since step {step}: backward passes add to what an "
        "optimizer has stepped on, in {rows} watched steps",
        "zero_grad() is missing, or is another optimizer's or model's",
        patience=3,
    ),
    Kind(
        "altered",
        "since step {step} the optimizer steps on other gradients than the backward passes left, "
        "and on no multiple of them, in {rows} watched steps",
        "noise, a sign or a rule of your own between backward() and step(); a clip keeps signs",
        patience=3,
        grade=lambda *_: "warn",
    ),
)
def exploding_signals(table: Table, follower: Follower) -> Iterator[None]:
    """A spike that passes is none; a branch that begins at zero may grow."""
    gradients, activations, total = Levels(), Levels(), Levels()
    is_big: Any = False
    is_wide: Any = False
    is_total_big: Any = False
    lows: list[tuple[int, Any]] = []
    while True:
        total.add(table.row.gradient_norm, is_total_big)
        is_total_big = total.rose(5.0)
        follower.mark("piled", table.row.left_over, table.row.gradient_norm, 0.0)
        follower.mark("altered", table.row.altered, table.row.gradient_norm, 0.0)
        gradients.add(table["parameter_gradient_norm"], is_big)
        is_big = gradients.rose(10.0)
        role = "parameter_gradients"
        follower.mark_levels("gradients", is_big & is_total_big, gradients, role=role)
        activations.add(table["activation_rms"], is_wide)
        _mark_growth(lows, table, activations, follower)
        is_wide = activations.rose(30.0)
        follower.mark_levels("activations", is_wide, activations)
        yield


_MATURE = 60


def _mark_growth(
    lows: list[tuple[int, Any]], table: Table, levels: Levels, follower: Follower
) -> None:
    """Compare the growth of late with that since the beginning; `lows` are levels of before."""
    count, low = table.steps, levels.low
    if not lows or count >= 1.05 * lows[-1][0]:
        lows.append((count, low))
    latest = next((level for step, level in reversed(lows) if step <= 0.8 * count), None)
    while len(lows) > 1 and lows[1][0] <= 0.6 * count:
        lows.pop(0)
    step, before = lows[0]
    if count < _MATURE or step > 0.6 * count or latest is None:
        return
    late, whole = low - before, low - levels.opening
    goes_on = low - latest > 0.2 * late
    is_steep = (late > math.log(3.0)) & (late > 0.3 * whole) & (whole > math.log(30.0))
    active, start = goes_on & is_steep & levels.valid, np.exp(levels.opening)
    follower.mark(
        "growth", active, np.exp(low), start, valid=levels.valid, facts={"lately": np.exp(late)}
    )


def _is_flat_alone(event: CourseEvent, course: Course) -> Severity | None:
    """A layer whose units died has lost its spread by that."""
    is_dead = any((e.kind, e.layer) == ("units", event.layer) for e in course.events)
    return None if is_dead else by_loss(event, course)


@rule(
    Kind(
        "units",
        "{value:.0%} of the units of {layer} are dead since step {step}; they were {reference:.0%}",
        "a step too large pushed its biases below all inputs, or its inputs shifted",
        limit="max_dying_fraction",
    ),
    Kind(
        "spread",
        "the standard deviation of {layer} fell to {change:.3g} of what was usual since step "
        "{step}, that of its input did not",
        "it saturates, or its weights shrank to nothing",
        "change",
        "min_spread_kept",
        grade=_is_flat_alone,
    ),
)
def dying_layers(table: Table, follower: Follower) -> Iterator[None]:
    """A third of dead units is no fault; nearly all are, in a layer that once was alive."""
    units, spread, inputs = Levels(), Levels(zeros=True), Levels(zeros=True)
    healthiest: Any = np.inf
    is_flat: Any = False
    while True:
        is_clear = table["unit_observations"] >= 16
        units.add(np.where(is_clear, 1.0 + table["dead_fraction"], np.nan))
        least, most = np.exp(units.low) - 1.0, np.exp(units.high) - 1.0
        healthiest = np.fmin(healthiest, most)
        active = (least > 0.7) & (healthiest < 0.5) & (units.count > 5)
        since = table.lately
        follower.mark("units", active, least, healthiest, valid=units.valid, since=since)
        is_finite = ~(table["activation_nonfinite"] > 0.0)
        spread.add(np.where(is_finite, table["activation_std"], np.nan), is_flat)
        inputs.add(table["input_std"], is_flat)
        has_input = ~(inputs.usual - inputs.low > math.log(10.0))
        is_flat = spread.fell(100.0) & has_input
        follower.mark_levels("spread", is_flat, spread, fell=True)
        yield


def _cut_for_long(event: CourseEvent, course: Course) -> Severity | None:
    """An expert may idle; a layer that is called and has no gradient for long is cut."""
    if event.value == 0.0:
        return by_loss(event, course)
    is_long = event.rows >= 0.5 * course.steps and event.facts["is_called"] > 0.0
    return "fail" if is_long else "warn"


_faded = partial(Kind, measure="change", limit="min_gradient_kept", patience=20)


@rule(
    _faded(
        "share",
        "the gradients of {layer} fell to {change:.3g} of their usual share since step {step}",
        "a layer behind it saturates, or its outputs no longer matter",
        grade=by_loss,
    ),
    _faded(
        "all",
        "all gradients fell to {change:.3g} of what was usual since step {step}, while the "
        "loss is {loss.recent:.3g}, its best {loss.best:.3g}",
        "what the loss is made of saturates: it no longer tells how to improve",
        grade=lambda event, course: None if course.loss.is_well else by_loss(event, course),
    ),
    Kind(
        "none",
        "the gradients of {layer} are zero or missing since step {step}, over {rows} watched "
        "steps, while others have theirs",
        "what it makes is dead behind it, or no longer reaches the loss",
        "rows",
        "max_steps_without_gradient",
        grade=_cut_for_long,
    ),
)
def fading_gradients(table: Table, follower: Follower) -> Iterator[None]:
    """Gradients that fade with the loss are those of a model that has learnt."""
    total, shares, own, without = Levels(zeros=True), Levels(), Levels(), Runs()
    has_faded: Any = False
    is_total_faded: Any = False
    role = "parameter_gradients"
    while True:
        norm, values = table.row.gradient_norm, table["parameter_gradient_norm"]
        is_zero = norm == 0.0
        total.add(norm, is_total_faded | is_zero)
        is_total_faded = total.fell(100.0) | is_zero
        high, usual, valid = np.exp(total.high), np.exp(total.usual), not math.isnan(norm)
        high = 0.0 if is_zero else high
        follower.mark("all", is_total_faded, high, usual, valid=valid, role="gradients")
        if not (math.isfinite(norm) and norm > 0.0):
            yield
            continue
        shares.add(values / norm, has_faded)
        own.add(values, has_faded)
        has_faded = shares.fell(100.0) & (own.usual - own.high > math.log(30.0))
        follower.mark_levels("share", has_faded, shares, fell=True, role=role)
        lacks = ~(values > 0.0) & (table["trainable_fraction"] > 0.0) & (own.count >= 5)
        lacks &= ~(table["parameter_gradient_nonfinite"] > 0.0)
        without.add(lacks, np.ones_like(lacks), table.row.step)
        follower.mark(
            "none",
            without.count >= 5,
            values,
            np.exp(own.usual),
            role=role,
            since=without.since,
            rows=without.count,
            facts={"is_called": ~np.isnan(table["activation_rms"])},
        )
        yield


def _saturated(event: CourseEvent, course: Course) -> Severity | None:
    """A model that knows its data by heart is certain; one that is stuck should not be."""
    loss = course.loss
    is_stuck = loss.is_known and loss.never_negative and loss.recent > 0.5 * loss.first
    return None if loss.is_at_floor else "fail" if is_stuck else "warn"


@rule(
    Kind(
        "ends",
        "{layer} saturates since step {step}: {value:.1%} at the ends of its range, at first "
        "{reference:.1%}",
        "its inputs grow without a bound: a softmax is one-hot, and gradients vanish",
        limit="max_saturating",
        grade=_saturated,
    )
)
def saturating_layers(table: Table, follower: Follower) -> Iterator[None]:
    """An output that is certain of data it knows by heart is none; nor is a gate that closes."""
    levels = Levels(zeros=True)
    while True:
        values = table["saturation"]
        if np.isnan(values).all():
            yield
            continue
        levels.add(values)
        low, opening = np.exp(levels.low), np.exp(levels.opening)
        valid = levels.valid & (levels.count > OPENING)
        active = valid & (low > 0.98) & (opening < 0.7)
        follower.mark("ends", active, low, opening, valid=valid)
        yield
