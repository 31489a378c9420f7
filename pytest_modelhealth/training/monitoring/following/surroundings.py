"""Follows what is around the layers: modes, hooks, inputs, running statistics, NaN and the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from pytest_modelhealth.training.monitoring.following.follower import (
    Follower,
    Level,
    Levels,
    Table,
    grown,
)
from pytest_modelhealth.training.monitoring.row import StepRow

_HAD = 5
_RISES = 10


def mode_switch(table: Table, follower: Follower) -> Iterator[None]:
    """An episode lasts while a layer that was in training mode is in evaluation mode."""
    trained = np.zeros(0)
    while True:
        modes = table.values("training_mode")
        trained = grown(trained, len(modes), 0.0) + (modes == 1.0)
        active = (modes == 0.0) & (trained >= _HAD)
        follower.mark("switched", active, modes, trained, told=~np.isnan(modes))
        yield


def growing_hooks(table: Table, follower: Follower) -> Iterator[None]:
    """An episode lasts while a layer has more hooks in every step than in the one before."""
    before = rises = np.zeros(0)
    while True:
        hooks = table.values("hooks")
        before, rises = grown(before, len(hooks)), grown(rises, len(hooks), 0.0)
        told = ~np.isnan(hooks)
        rises = np.where(hooks > before, rises + 1.0, rises * ~told)
        follower.mark("rising", rises >= _RISES, hooks, before, told=told)
        before = np.where(told, hooks, before)
        yield


_LEAST = 15
_SHIFT = math.log(10.0)
_CONSTANT = 1e-6


def input_shift(table: Table, follower: Follower) -> Iterator[None]:
    """Compares the standard deviation of the model's inputs with what was usual."""
    spread = Level()
    is_shifted = False
    while True:
        std = table.row["", "input_std"] if "" in table.row.layers else math.nan
        if not math.isnan(std):
            spread.add(std, held=is_shifted)
            usual = math.exp(spread.usual)
            is_constant = spread.count >= _LEAST and std < _CONSTANT * usual
            follower.mark("constant", is_constant, std, usual, sign=-1)
            if not is_constant:
                is_up = spread.low - spread.usual > _SHIFT
                is_down = spread.usual - spread.high > _SHIFT
                is_shifted = spread.count > _LEAST and (is_up or is_down)
                value = math.exp(spread.low if is_up else spread.high)
                follower.mark("scale", is_shifted, value, usual)
        yield


_BUFFERS_LEAST = 20
_FAR = 10.0


def statistics_drift(table: Table, follower: Follower) -> Iterator[None]:
    """Compares the running deviation with the usual deviation of what the layer is given."""
    running, inputs = Levels(), Levels()
    while True:
        in_training = table.values("training_mode") == 1.0
        values = np.where(in_training, table.values("running_std"), np.nan)
        if follower.open or not np.isnan(values).all():
            running.add(values)
            inputs.add(table.values("input_std"))
            value, usual = np.exp(running.low), np.exp(inputs.usual)
            told = running.valid & (running.count > _BUFFERS_LEAST)
            follower.mark("far", told & (value > _FAR * usual), value, usual, told=told)
        yield


SKIPPED = "skipped"
MASKED = "masked"
POISONED = "poisoned"


def nonfinite_steps(table: Table, follower: Follower) -> Iterator[None]:
    """Tells steps that are skipped from those that reach the weights."""
    loss_before, step_before = math.nan, -1
    while True:
        row = table.row
        kind, origin, loss = _kind(row), row.origin, row.loss
        for other, layer in list(follower.open):
            if other != kind and not (other == POISONED and kind == SKIPPED):
                follower.mark(other, False, math.nan, math.nan, layer=layer)
        begun = [layer for own, layer in follower.open if own == kind]
        if begun:
            follower.mark(kind, True, math.nan, loss_before, layer=begun[0])
        elif kind:
            follower.mark(
                kind,
                True,
                math.nan if loss is None else loss,
                loss_before,
                layer="" if origin is None else origin.layer,
                role="loss" if origin is None else origin.role,
                tensor="" if origin is None else origin.name,
                facts={"loss_before": loss_before, "step_before": step_before},
            )
        if loss is not None and math.isfinite(loss):
            loss_before = loss
        step_before = row.step
        yield


def _kind(row: StepRow) -> str:
    """Return what kind of step it is; ``""`` if all are numbers."""
    bad_loss = row.loss is not None and not math.isfinite(row.loss)
    if row.origin is None and not bad_loss and not math.isinf(row.gradient_norm):
        return ""
    if bool((row.values["parameter_nonfinite"] > 0).any()):
        return POISONED
    bad_gradients = not math.isfinite(row.gradient_norm) and bool(
        (row.values["parameter_gradient_nonfinite"] > 0).any()
    )
    if not bad_loss and not bad_gradients and row.origin is not None:
        is_forward = row.origin.role in ("inputs", "activations")
        return MASKED if is_forward else SKIPPED
    return POISONED if row.optimizer_steps else SKIPPED


_NOISE = 6.0
_SHARE = 0.5
_SOME = 0.05


def loss_divergence(table: Table, follower: Follower) -> Iterator[None]:
    """An episode lasts while the loss is above its best by more than its own noise."""
    updates, gradients = Level(), Level()
    noise, best_step, above_since = math.inf, -1, -1
    nothing = {"update_ratio": 0.0, "update_growth": 0.0, "gradient_growth": 0.0}
    most = nothing
    while True:
        row, loss, is_on = table.row, table.loss.summary, bool(follower.open)
        updates.add(row.update_ratio, held=is_on)
        gradients.add(row.gradient_norm, held=is_on)
        if not loss.is_known or row.loss is None:
            yield
            continue
        if not is_on and (loss.best_step != best_step or noise > loss.noise):
            best_step, noise = loss.best_step, loss.noise
        floor = max(_NOISE * noise, _SHARE * loss.progress, _SOME * abs(loss.first))
        if row.loss - loss.best <= floor:
            above_since = -1
        elif above_since < 0:
            above_since = row.step
        is_above = not loss.lost <= floor
        if is_above:
            latest = {
                "update_ratio": math.exp(updates.low),
                "update_growth": math.exp(updates.low - updates.usual),
                "gradient_growth": math.exp(gradients.low - gradients.reference),
            }
            # the largest of each; NaN, of few values, is none
            most = {name: max(most[name], value) for name, value in latest.items()}
        else:
            most = nothing
        follower.mark(
            "loss",
            is_above,
            loss.recent,
            loss.best,
            since=above_since if above_since >= 0 else None,
            facts={**most, "first": loss.first, "noise": noise, "best_step": loss.best_step},
        )
        yield
