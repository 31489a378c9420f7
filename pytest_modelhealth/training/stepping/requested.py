"""What a step is asked for: to overfit one batch, and to resume from its saved state."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from pytest_modelhealth.probes.intervening.running import said
from pytest_modelhealth.progress import track
from pytest_modelhealth.training.stepping.session import Session, loss_in


def overfitted(session: Session, calls: int) -> tuple[float, float, int]:
    """Call the step on the one batch again and again; return the first and least loss, and when."""
    session.rewind()
    losses = [_number(session) for _ in track(range(calls), "overfitting")]
    best = min(range(calls), key=lambda n: losses[n] if math.isfinite(losses[n]) else math.inf)
    return losses[0], losses[best], best + 1


def _number(session: Session) -> float:
    try:
        loss = loss_in(session.call())
    except Exception:  # noqa: BLE001 - a later call, of which another check says that it raises
        return math.nan
    return math.nan if loss is None else loss


def resumed(session: Session) -> str:
    """Save after one call, make another; load into what was before, and make that call again.

    Returns:
        What differs, the first such; ``""`` if nothing does, bit for bit.
    """
    session.rewind()
    session.call()
    try:
        saved = [copy.deepcopy(one.state_dict()) for one in _stateful(session)]
        once = _next(session)
        session.rewind()
        for one, state in zip(_stateful(session), saved, strict=True):
            one.load_state_dict(state)
        again = _next(session)
    except Exception as error:  # noqa: BLE001 - the user's, in an order that we chose
        return f"the step cannot be resumed: {said(error)}"
    for name, value in once.items():
        other = again.get(name)
        if other is None or not _equal(value, other):
            return name
    return ""


def _stateful(session: Session) -> list[Any]:
    return [session.model, *session.given.optimizers, *session.given.restore]


def _next(session: Session) -> dict[str, Any]:
    """Make a call, and return all that it leaves."""
    session.snapshot.restore_random_numbers()
    session.clear_gradients()
    loss = loss_in(session.call())
    left: dict[str, Any] = {"the loss": math.nan if loss is None else loss}
    for name, tensor in session.model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            left[name] = tensor.detach().clone()
    return left


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor):
        return isinstance(other, Tensor) and torch.equal(
            value.nan_to_num() if value.is_floating_point() else value,
            other.nan_to_num() if other.is_floating_point() else other,
        )
    return bool(value == other or (math.isnan(value) and math.isnan(other)))
