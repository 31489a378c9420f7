"""Follows what is around the layers: modes, hooks, inputs, running statistics, NaN and the loss."""

from __future__ import annotations

import math

import numpy as np

from pytest_modelhealth.training.monitoring.following.follower import (
    Follower,
    Level,
    Levels,
    Table,
    grown,
)
from pytest_modelhealth.training.monitoring.row import Reals, StepRow

_HAD = 5
_RISES = 10


class ModeFollower(Follower):
    """An episode lasts while a layer that was in training mode is in evaluation mode."""

    _trained: Reals = np.zeros(0)

    def see(self, table: Table) -> None:
        """See the latest step."""
        modes = table.values("training_mode")
        self._trained = grown(self._trained, len(modes), 0.0)
        self._trained += modes == 1.0
        active = (modes == 0.0) & (self._trained >= _HAD)
        told = ~np.isnan(modes)
        self.mark("switched", active, told, modes, self._trained)


class HookFollower(Follower):
    """An episode lasts while a layer has more hooks in every step than in the one before."""

    _before: Reals = np.zeros(0)
    _rises: Reals = np.zeros(0)

    def see(self, table: Table) -> None:
        """See the latest step."""
        hooks = table.values("hooks")
        self._before = grown(self._before, len(hooks))
        self._rises = grown(self._rises, len(hooks), 0.0)
        told = ~np.isnan(hooks)
        self._rises = np.where(hooks > self._before, self._rises + 1.0, self._rises * ~told)
        active = self._rises >= _RISES
        self.mark("rising", active, told, hooks, self._before)
        self._before = np.where(told, hooks, self._before)


_LEAST = 15
_SHIFT = math.log(10.0)
_CONSTANT = 1e-6


class InputFollower(Follower):
    """Compares the standard deviation of the model's inputs with what was usual."""

    role = "inputs"

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
        spread = self._spread
        spread.add(std, held=self._is_shifted)
        usual = math.exp(spread.usual)
        if spread.count >= _LEAST and std < _CONSTANT * usual:
            self.go_on("constant", "", std, usual, sign=-1)
            return
        self.end("constant")
        above, below = spread.low - spread.usual, spread.usual - spread.high
        self._is_shifted = spread.count > _LEAST and (above > _SHIFT or below > _SHIFT)
        if self._is_shifted:
            found = spread.low if above > _SHIFT else spread.high
            self.go_on("scale", "", math.exp(found), usual)
        else:
            self.end("scale")


_BUFFERS_LEAST = 20
_FAR = 10.0


class BufferFollower(Follower):
    """Compares the running deviation with the usual deviation of what the layer is given."""

    role = "buffers"

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self._running, self._given = Levels(), Levels()

    def see(self, table: Table) -> None:
        """See the latest step."""
        running = np.where(
            table.values("training_mode") == 1.0, table.values("running_std"), np.nan
        )
        if np.isnan(running).all() and not self._open:
            return
        self._running.add(running)
        self._given.add(table.values("input_std"))
        value, usual = np.exp(self._running.low), np.exp(self._given.usual)
        told = self._running.valid & (self._running.count > _BUFFERS_LEAST)
        active = told & (value > _FAR * usual)
        self.mark("far", active, told, value, usual)


SKIPPED = "skipped"
MASKED = "masked"
POISONED = "poisoned"


class NonfiniteFollower(Follower):
    """Tells steps that are skipped from those that reach the weights."""

    _loss_before = math.nan
    _step_before = -1

    def see(self, table: Table) -> None:
        """See the latest step."""
        row = table.row
        kind = _kind(row)
        for other in (SKIPPED, MASKED, POISONED):
            if other != kind and not (other == POISONED and kind == SKIPPED):
                self._finish(other)
        if kind:
            self._note(kind, row)
        if row.loss is not None and math.isfinite(row.loss):
            self._loss_before = row.loss
        self._step_before = row.step

    def _note(self, kind: str, row: StepRow) -> None:
        layer = next((layer for own, layer in self._open if own == kind), None)
        origin = row.origin
        if layer is not None:
            self.go_on(kind, layer, math.nan, self._loss_before)
            return
        self.go_on(
            kind,
            "" if origin is None else origin.layer,
            math.nan if row.loss is None else row.loss,
            self._loss_before,
            role="loss" if origin is None else origin.role,
            tensor="" if origin is None else origin.name,
            facts={"loss_before": self._loss_before, "step_before": float(self._step_before)},
        )

    def _finish(self, kind: str) -> None:
        for own, layer in list(self._open):
            if own == kind:
                self.end(kind, layer)


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


class DivergenceFollower(Follower):
    """An episode lasts while the loss is above its best by more than its own noise."""

    role = "loss"

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
            loss.recent,
            loss.best,
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
