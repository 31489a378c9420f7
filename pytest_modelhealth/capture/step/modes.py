"""Has a model be in training or in evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pytest_modelhealth.capture.step.guard import Guard, exited_whole
from pytest_modelhealth.capture.step.state import State
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.layers import type_name


@contextmanager
def in_mode(model: Any, training: bool | None) -> Iterator[None]:
    """Have `model` be in a mode inside; ``None`` leaves it in its own.

    A `train` of the user's own is called, as it may keep parts frozen; what it changes, values of
    parameters among them, is put back.

    Raises:
        InspectionError: the model has no modes.
    """
    if training is None:
        yield
        return
    if getattr(model, "training", None) is None:  # exported, or run by another runtime
        raise InspectionError(_ONE_MODE.format(type_name(model)))
    state = State(model)
    guard = Guard(state, values=any(map(_has_own_train, state.modules)), numbers=False)
    with exited_whole(guard):
        try:
            model.train(training)
        except NotImplementedError:  # the module of an exported program
            raise InspectionError(_ONE_MODE.format(type_name(model))) from None
        yield


_ONE_MODE = (
    "{} is in the mode it was made in, for good: leave training out, or inspect the model that it "
    "was made of"
)


def _has_own_train(module: nn.Module) -> bool:
    """Whether `train` or `eval` of a module is not that of torch."""
    return any(
        not getattr(getattr(type(module), name), "__module__", "").startswith("torch.")
        for name in ("train", "eval")
    )
