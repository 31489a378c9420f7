"""Follows values that are no numbers: where they begin, and whether anybody learns from them."""

from __future__ import annotations

import math

from pytest_modelhealth.training.monitoring.following.follower import Follower
from pytest_modelhealth.training.monitoring.following.table import Table
from pytest_modelhealth.training.monitoring.row import StepRow

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
            self.go_on(kind, layer, row.step, math.nan, self._loss_before)
            return
        self.go_on(
            kind,
            "" if origin is None else origin.layer,
            row.step,
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
