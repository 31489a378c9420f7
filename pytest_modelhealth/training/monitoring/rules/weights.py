"""Rules for weights: updates, sizes, what stands still and what something else writes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from pytest_modelhealth.report import Course, CourseEvent
from pytest_modelhealth.settings import Severity
from pytest_modelhealth.training.monitoring.course import Follower, Table
from pytest_modelhealth.training.monitoring.levels import LATELY, Levels, Runs
from pytest_modelhealth.training.monitoring.rule import Kind, by_loss, rule

_CHANGES = (
    "each step changes the weights of {layer} by {value:.3g} of their norm, since step {step}"
)
_RATE = "the learning rate is too large for these weights"


@rule(
    Kind("large", _CHANGES, _RATE, limit="max_update_ratio", patience=20, grade=by_loss),
    Kind(
        "useless",
        _CHANGES + ", and the loss is where it began",
        _RATE,
        patience=100,
        grade=lambda event, course: "warn" if course.loss.is_flat else None,
    ),
)
def update_ratio(table: Table, follower: Follower) -> Iterator[None]:
    """Weights that begin at zero may grow at first."""
    ratios = Levels()
    while True:
        ratios.add(table["weight_update_ratio"])
        active = (np.exp(ratios.low) > 0.01) & (ratios.count > 10)
        for kind in ("large", "useless"):
            follower.mark_levels(kind, active, ratios)
        yield


def _drifted(event: CourseEvent, course: Course) -> Severity | None:
    """By a factor of a thousand it fails, whatever the loss says."""
    small, large = sorted((event.value, event.reference))
    return "fail" if large > 1000.0 * small else by_loss(event, course)


_SIZES = "from {reference:.3g} to {value:.3g} (rms); it passed a tenth of that in step {step}"


@rule(
    Kind(
        "growth",
        "the parameters of {layer} grew {change:.3g}-fold, " + _SIZES,
        "steps are too large, and nothing bounds these weights",
        "change",
        "max_weight_growth",
        grade=_drifted,
    ),
    Kind(
        "shrinking",
        "the parameters of {layer} shrank to {change:.3g}, " + _SIZES,
        "weight decay outweighs what the loss asks for",
        "change",
        "min_weight_kept",
        grade=_drifted,
    ),
)
def weight_drift(table: Table, follower: Follower) -> Iterator[None]:
    """What begins at zero may grow to the size of others."""
    levels = Levels(zeros=True)
    first: Any = np.nan
    largest: Any = 0.0
    while True:
        sizes = table["parameter_rms"]
        levels.add(sizes)
        first = np.where(np.isnan(first), sizes, first)
        low, high = np.exp(levels.low), np.exp(levels.high)
        largest = np.fmax(largest, low)
        valid = levels.valid & (levels.count >= LATELY)
        # What begins near zero may grow to the size of others, and twice the normal one is not.
        start = np.maximum(first, 0.2)
        active = valid & (low / start > 10.0) & (low > 1.0)
        follower.mark("growth", active, low, start, valid=valid)
        follower.mark("shrinking", valid & (high / largest < 0.1), high, largest, valid=valid)
        yield


def _for_long(event: CourseEvent, course: Course) -> Severity | None:
    """An update that is exactly zero is never meant; a layer may be left out for a while."""
    is_long = event.rows >= 0.5 * course.steps
    return "fail" if is_long or event.value == 0.0 else "warn"


_RESTS = "{layer} is no longer updated since step {step}, over {rows} watched steps, "
_still = partial(Kind, measure="rows", limit="max_still_steps")


@rule(
    _still(
        "rests",
        _RESTS + "while others are",
        "it was frozen, or its learning rate fell to zero: waive it if that is meant",
        grade="warn",
    ),
    _still(
        "stands",
        _RESTS + "though it has gradients and other layers move",
        "no optimizer holds it since one was made anew, or its updates are too small for its dtype",
        grade=_for_long,
    ),
    _still(
        "rate",
        "{layer} is never updated, over {rows} watched steps: its learning rate is 0 from the "
        "start, though it has gradients and other layers move",
        "a group has lr=0, or its schedule multiplies by 0: freeze what should not learn",
        grade="warn",
    ),
    _still(
        "never",
        "{layer} is never updated, over {rows} watched steps: it has gradients, other layers move, "
        "and no optimizer holds it",
        "its parameters are in no group, or were made or replaced after the optimizer was; what "
        "should not learn is frozen by requires_grad_(False)",
    ),
)
def stopped_updates(table: Table, follower: Follower) -> Iterator[None]:
    """Frozen layers, and those whose rate a schedule brings to zero, may stand still."""
    has_matrix: Any = False
    moved: Any = 0.0
    still, never = Runs(), Runs()
    first: Any = np.nan
    while True:
        if not table.row.update_ratio > 0.0:
            yield
            continue
        weights, rates = table["weight_update_ratio"], table["learning_rate"]
        has_matrix = has_matrix | (weights > 0.0)
        updates = np.where(has_matrix, weights, table["update_norm"])
        moved = moved + (updates > 0.0)
        trainable = table["trainable_fraction"]
        rests = (trainable == 0.0) | (rates == 0.0)  # on purpose, it seems
        active = (moved >= 5) & ~(updates > 0.0) & rests
        follower.mark("rests", active, 0.0, moved, valid=~np.isnan(trainable))
        waits = (rates == 0.0) & (moved == 0) & (table["parameter_gradient_norm"] > 0.0)
        follower.mark("rate", waits, 0.0, 0.0, valid=~np.isnan(rates))
        # an optimizer that steps at other times would change their norm
        norms, has_gradient = table["parameter_norm"], table["parameter_gradient_norm"] > 0.0
        first = np.where(np.isnan(first), norms, first)
        idle = has_gradient & (norms == first) & np.isnan(rates) & (trainable == 1.0)
        never.add(idle, idle | (norms != first), table.row.step)
        since, rows = never.since, never.count
        active = idle & (rows >= 5)
        valid = idle | (norms != first)
        follower.mark("never", active, 0.0, moved, valid=valid, since=since, rows=rows)
        pushed = (moved >= 5) & has_gradient
        stands = pushed & ~(updates > 0.0) & ~rests
        valid = stands | (updates > 0.0) | (rates == 0.0)
        still.add(stands, valid, table.row.step)
        since, rows = still.since, still.count
        active = stands & (rows >= 5)
        follower.mark("stands", active, updates, moved, valid=valid, since=since, rows=rows)
        yield


_ULP = 1e-8  # less than half of the last digit of float32, by the value itself


def _stops(event: CourseEvent, course: Course) -> Severity | None:
    """It is most of the training, and longer than the pauses that a loop makes."""
    is_long = event.rows >= 0.4 * course.steps and event.rows > 4 * event.reference
    return "fail" if is_long else None


def _learns_nothing(event: CourseEvent, course: Course) -> Severity | None:
    """Adversarial losses stand still in healthy trainings, and noise hides what is learnt."""
    loss = course.loss
    is_clear = loss.never_negative and loss.noise < 0.3 * abs(loss.first)
    return "warn" if is_clear and course.most_optimizer_steps <= 1 else None


_standing = partial(Kind, measure="rows", limit="max_steps_standing")


@rule(
    _standing(
        "gradients",
        "no gradient came to any parameter in {rows} watched steps",
        "the loss is not computed from the output, or backward() is missing",
    ),
    _standing(
        "stopped",
        "no parameter changed since step {step}, over {rows} watched steps, though gradients came",
        "the learning rate or the gradient is too small, or the optimizer holds other tensors",
        grade=_stops,
    ),
    _standing(
        "gone",
        "no forward pass of the model was seen since step {step}, over {rows} watched steps, "
        "though losses go on",
        "the loop trains another object: a copy, a model that was loaded, or a new wrapper",
    ),
    _standing(
        "loss",
        "the loss is where it began after {rows} watched steps: {loss.recent:.3g}",
        "updates are of the wrong size, or targets, inputs and output do not belong together",
        scale=5,
        grade=_learns_nothing,
    ),
    unless="is_at_floor",
    unseen="no forward pass was seen in {} watched steps: the loop must train this very object, "
    "with gradients on, before step_end()",
)
def standstill(table: Table, follower: Follower) -> Iterator[None]:
    """Something is learnt, or there is nothing to learn; each ends with the first change."""
    before, is_without = math.nan, True
    count, longest, since = 0, 0, 0  # of steps in a row that change nothing
    while True:
        row, loss = table.row, table.loss.summary
        norms = float(row.values["parameter_norm"][row.values["parameter_norm"] > 0.0].sum())
        is_next_to_same = abs(norms - before) <= _ULP * norms and not row.update_ratio > _ULP
        before = norms
        has_gradients = row.gradient_norm > 0.0 or math.isinf(row.gradient_norm)
        flows = has_gradients or bool((row.values["gradient_norm"] > 0.0).any())
        is_without &= not has_gradients
        first, rows = loss.first, table.steps
        is_cut = is_without and row.passes > 0
        follower.mark("gradients", is_cut, row.gradient_norm, first, rows=rows)
        stops = is_next_to_same and flows
        valid = not math.isnan(row.gradient_norm) or row.update_ratio > 0.0
        if stops:
            since = since if count else row.step
            count += 1
        elif valid:
            longest = max(longest, count) if row.update_ratio > _ULP else longest
            count = 0
        follower.mark("stopped", stops, count, longest, valid=valid, since=since, rows=count)
        is_gone = row.passes == 0 and row.loss is not None and table.passes > 0
        follower.mark("gone", is_gone, 0.0, 0.0)
        is_flat = loss.is_known and loss.is_flat
        follower.mark("loss", is_flat, loss.recent, first, role="loss", rows=rows)
        yield


@rule(
    Kind(
        "outside",
        "something else wrote the weights of {layer} before step {last}: their norm went from "
        "{reference:.3g} to {value:.3g}, by an update of {update:.3g}",
        "they were initialised anew, loaded, averaged or scaled by something else",
        patience=1,
        grade="warn",
    )
)
def outside_changes(table: Table, follower: Follower) -> Iterator[None]:
    """A norm changes by no more than the norm of the update, unless something else writes.

    Bounds that are put on weights in each step belong to a training, and are none.
    """
    before: Any = np.nan
    updates: Any = np.nan
    quiet: Any = 0.0
    step = -1
    while True:
        norms = table["parameter_norm"]
        if table.row.step == step + 1:
            jump = np.abs(norms - before)
            is_other = (updates > 0.0) & (jump > 3.0 * updates) & (jump > 0.03 * before)
            active = is_other & (quiet >= 20)
            follower.mark("outside", active, norms, before, valid=False, facts={"update": updates})
            quiet = np.where(is_other, 0.0, quiet + (updates > 0.0))
        before, step, updates = norms, table.row.step, table["update_norm"]
        yield
