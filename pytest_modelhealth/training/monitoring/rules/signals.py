"""Rules for activations and gradients of layers: what grows, dies, fades or saturates.

A rule is a generator that looks at each step and marks what goes on, and a table of what is wrong
with that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np

from pytest_modelhealth.report import Course, CourseEvent
from pytest_modelhealth.settings import Severity
from pytest_modelhealth.training.monitoring.course import Follower, Table
from pytest_modelhealth.training.monitoring.levels import (
    OPENING,
    Level,
    Levels,
    Mask,
    Runs,
    grown,
)
from pytest_modelhealth.training.monitoring.row import Reals
from pytest_modelhealth.training.monitoring.rule import Kind, Rule, by_loss, rule

RULES: dict[str, Rule] = {}

_LEAST = 15  # values before anything is usual
_TEN, _THIRTY, _HUNDRED = math.log(10.0), math.log(30.0), math.log(100.0)
_TOTAL = math.log(5.0)


def exploding_signals(table: Table, follower: Follower) -> Iterator[None]:
    """An episode lasts while the least of the latest values is far above what is usual."""
    gradients, activations, total = Levels(), Levels(), Level()
    is_total_big = False
    is_big = is_wide = np.zeros(0, dtype=bool)
    kept: list[tuple[int, Reals]] = []
    while True:
        total.add(table.row.gradient_norm, going_on=is_total_big)
        is_total_big = total.low - total.reference > _TOTAL and total.count > _LEAST
        gradients.add(table.values("parameter_gradient_norm"), is_big)
        usual = gradients.reference
        is_big = (gradients.low - usual > _TEN) & (gradients.count > _LEAST)
        role = "parameter_gradients"
        follower.mark_levels("gradients", is_big & is_total_big, gradients, usual, role=role)
        activations.add(table.values("activation_rms"), is_wide)
        _mark_growth(kept, table, activations, follower)
        usual = activations.reference
        is_wide = (activations.low - usual > _THIRTY) & (activations.count > _LEAST)
        follower.mark_levels("activations", is_wide, activations, usual)
        yield


_MATURE = 60
_LATE = math.log(3.0)


def _mark_growth(
    kept: list[tuple[int, Reals]], table: Table, levels: Levels, follower: Follower
) -> None:
    """Compare the growth of late with that since the beginning; `kept` are levels of before."""
    count, low = table.steps, levels.low
    if not kept or count >= 1.05 * kept[-1][0]:
        kept.append((count, low))
    latest = next((level for step, level in reversed(kept) if step <= 0.8 * count), None)
    while len(kept) > 1 and kept[1][0] <= 0.6 * count:
        kept.pop(0)
    step, before = kept[0]
    if count < _MATURE or step > 0.6 * count or latest is None:
        return
    late, whole = low - grown(before, len(low)), low - levels.opening
    goes_on = low - grown(latest, len(low)) > 0.2 * late
    active = goes_on & (late > _LATE) & (late > 0.3 * whole) & (whole > _THIRTY) & levels.valid
    value, start, facts = np.exp(low), np.exp(levels.opening), {"lately": np.exp(late)}
    follower.mark("growth", active, value, start, valid=levels.valid, facts=facts)


_HUGE = 1e4  # activations below are in range, whatever they began at
_CERTAIN = 1e6


def _exploded(event: CourseEvent, course: Course) -> Severity | None:
    if event.kind == "gradients":  # by six orders of magnitude: whatever the loss says
        is_certain = bool(event.reference) and event.value > _CERTAIN * event.reference
        return "fail" if is_certain else by_loss(event, course)
    if event.value >= _HUGE:
        return by_loss(event, course)
    return "warn" if course.loss.is_known and not course.loss.is_well else None


def _exponential(event: CourseEvent, course: Course) -> Severity | None:
    has_grown = bool(event.reference) and event.value > 100.0 * event.reference
    return "fail" if has_grown and event.value >= 10.0 else None


_ROSE = (
    " of {layer} grew {change:.3g}-fold, from {reference:.3g} to {value:.3g}, and stays there "
    "since step {step}"
)
_rising = partial(
    Kind,
    cause="steps are too large for this layer, and nothing bounds what it makes",
    measure="change",
    grade=_exploded,
)

# A spike that passes is none; a branch that begins at zero may grow.
RULES["exploding_signals"] = rule(
    exploding_signals,
    _rising("gradients", "the gradient norm" + _ROSE, limit="max_gradient_rise"),
    _rising("activations", "the activations (rms)" + _ROSE, limit="max_activation_rise"),
    Kind(
        "growth",
        "the activations (rms) of {layer} grow exponentially: {change:.3g}-fold so far, from "
        "{reference:.3g} to {value:.3g}, and {lately:.3g}-fold in the last two fifths of the "
        "training",
        "a gain, a scale or a reward of size is multiplied or rewarded without a bound",
        "change",
        grade=_exponential,
    ),
)


def dying_layers(table: Table, follower: Follower) -> Iterator[None]:
    """Dead units count where 16 values of each were seen, in a layer that once was alive."""
    units, spread, inputs = Levels(), Levels(zeros=True), Levels(zeros=True)
    healthiest = np.zeros(0)
    is_flat: Mask = np.zeros(0, dtype=bool)
    while True:
        dead = table.values("dead_fraction")
        units.add(np.where(table.values("unit_observations") >= 16, 1.0 + dead, np.nan))
        least, most = np.exp(units.low) - 1.0, np.exp(units.high) - 1.0
        healthiest = np.fmin(grown(healthiest, len(dead), np.inf), most)
        active = (least > 0.7) & (healthiest < 0.5) & (units.count > 5)
        since = table.lately
        follower.mark("units", active, least, healthiest, valid=units.valid, since=since)
        is_finite = ~(table.values("activation_nonfinite") > 0.0)
        spread.add(np.where(is_finite, table.values("activation_std"), np.nan), is_flat)
        inputs.add(table.values("input_std"), is_flat)
        has_input = ~(inputs.usual - inputs.low > _TEN)
        is_flat = (spread.usual - spread.high > _HUNDRED) & has_input & (spread.count > _LEAST)
        follower.mark_levels("spread", is_flat, spread, spread.usual, fell=True)
        yield


def _is_flat_alone(event: CourseEvent, course: Course) -> Severity | None:
    """A layer whose units died has lost its spread by that."""
    is_dead = any((e.kind, e.layer) == ("units", event.layer) for e in course.events)
    return None if is_dead else by_loss(event, course)


# A third of dead units is no fault; nearly all are.
RULES["dying_layers"] = rule(
    dying_layers,
    Kind(
        "units",
        "{value:.0%} of the units of {layer} are dead since step {step}; they were {reference:.0%}",
        "a step too large pushed its biases below all inputs, or its inputs shifted",
        limit="max_dying_fraction",
    ),
    Kind(
        "spread",
        "the output of {layer} became constant: its standard deviation fell to {change:.3g} of "
        "what was usual since step {step}, that of its input did not",
        "it saturates, or its weights shrank to nothing",
        "change",
        "min_spread_kept",
        below=True,
        grade=_is_flat_alone,
    ),
)


def fading_gradients(table: Table, follower: Follower) -> Iterator[None]:
    """Compares a layer's gradients with those of the whole model, and all with what was usual."""
    total, shares, own, without = Level(), Levels(), Levels(), Runs()
    has_faded: Mask = np.zeros(0, dtype=bool)
    is_total_faded, zeros, role = False, 0, "parameter_gradients"
    while True:
        norm, values = table.row.gradient_norm, table.values("parameter_gradient_norm")
        total.add(norm, going_on=is_total_faded)
        zeros = zeros + 1 if norm == 0.0 else 0
        is_total_faded = total.usual - total.high > _HUNDRED and total.count > _LEAST
        high, usual = np.exp([total.high, total.usual]).tolist()
        valid = not math.isnan(norm)
        follower.mark("all_zero", zeros > 1, 0.0, usual, valid=valid, role="gradients")
        follower.mark("all", is_total_faded, high, usual, valid=valid, role="gradients")
        if not (math.isfinite(norm) and norm > 0.0):
            yield
            continue
        shares.add(values / norm, has_faded)
        own.add(values, has_faded)
        has_faded = (shares.usual - shares.high > _HUNDRED) & (own.usual - own.high > _THIRTY)
        has_faded &= shares.count > _LEAST
        follower.mark_levels("share", has_faded, shares, shares.usual, fell=True, role=role)
        lacks = ~(values > 0.0) & (table.values("trainable_fraction") > 0.0) & (own.count >= 5)
        lacks &= ~(table.values("parameter_gradient_nonfinite") > 0.0)
        without.add(lacks, np.ones(len(values), dtype=bool), table.row.step)
        is_cut = without.count >= 5
        if is_cut.any() or follower.open:
            facts = {"is_called": ~np.isnan(table.values("activation_rms"))}
            usual, since, rows = np.exp(own.usual), without.since, without.count
            for kind, active in (("zero", values == 0.0), ("missing", values != 0.0)):
                active &= is_cut
                follower.mark(
                    kind, active, 0.0, usual, role=role, since=since, rows=rows, facts=facts
                )
        yield


def _still_high(event: CourseEvent, course: Course) -> Severity | None:
    return None if course.loss.is_well else by_loss(event, course)


def _cut_for_long(event: CourseEvent, course: Course) -> Severity | None:
    """An expert may idle; a layer that is called and has no gradient for long is cut."""
    is_long = event.rows >= 0.5 * course.steps and event.facts["is_called"] > 0.0
    return "fail" if is_long else "warn"


_faded = partial(
    Kind, measure="change", limit="min_gradient_kept", below=True, patience=20, grade=_still_high
)
_cut = partial(
    Kind,
    cause="what it makes is dead behind it, or no longer reaches the loss",
    measure="rows",
    limit="max_steps_without_gradient",
)
_NO_GRADIENT = " since step {step}, over {rows} watched steps, while others have theirs"

# Gradients that fade with the loss are those of a model that has learnt.
RULES["fading_gradients"] = rule(
    fading_gradients,
    _faded(
        "share",
        "the gradients of {layer} fell to {change:.3g} of their usual share of all since step "
        "{step}",
        "a layer behind it saturates, or its outputs no longer matter",
        grade=by_loss,
    ),
    _faded(
        "all",
        "all gradients fell to {change:.3g} of what was usual since step {step}, while the "
        "loss is {loss.recent:.3g}, its best {loss.best:.3g}",
        "what the loss is made of saturates: it no longer tells how to improve",
    ),
    Kind(
        "all_zero",
        "every gradient is exactly zero since step {step}, while the loss is {loss.recent:.3g}",
        "all units are dead or saturated, or the loss is clamped",
        patience=20,
        grade=_still_high,
    ),
    _cut("zero", "the gradients of {layer} are exactly zero" + _NO_GRADIENT, grade=by_loss),
    _cut("missing", "the gradients of {layer} are missing" + _NO_GRADIENT, grade=_cut_for_long),
)


def saturating_layers(table: Table, follower: Follower) -> Iterator[None]:
    """An episode lasts while the least of the latest is near 1, where it began well below."""
    levels = Levels(zeros=True)
    while True:
        values = table.values("saturation")
        valid = ~np.isnan(values)
        if valid.any() or follower.open:
            levels.add(values)
            low, opening = np.exp(levels.low), np.exp(levels.opening)
            valid &= levels.count > OPENING
            active = valid & (low > 0.98) & (opening < 0.7)
            follower.mark("ends", active, low, opening, valid=valid)
        yield


def _saturated(event: CourseEvent, course: Course) -> Severity | None:
    """A model that knows its data by heart is certain; one that is stuck should not be."""
    loss = course.loss
    if loss.is_at_floor:
        return None
    is_stuck = loss.is_known and loss.never_negative and loss.recent > 0.5 * loss.first
    return "fail" if is_stuck else "warn"


# An output that is certain of data it knows by heart is none; nor is a gate that closes.
RULES["saturating_layers"] = rule(
    saturating_layers,
    Kind(
        "ends",
        "{layer} saturates since step {step}: its values are at the ends of their range to "
        "{value:.1%}, at first to {reference:.1%}",
        "its inputs grow without a bound: a softmax is one-hot, and gradients vanish",
        limit="max_saturating",
        grade=_saturated,
    ),
)
