"""What ``make()`` returns: a model, and what it is run on."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pytest_modelhealth.capture.observing.tensors import find_tensors
from pytest_modelhealth.capture.step.batch import Inputs, copied_batch
from pytest_modelhealth.capture.step.loss_value import compute_loss
from pytest_modelhealth.capture.step.untouched import random_state, restore_random_state
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.plugin.suite.suite import ModelHealthSuite
from pytest_modelhealth.rendering.notation import abbreviate

_SHAPES = (
    "(model, inputs), (model, inputs, loss), (model, inputs, target), or "
    "(model, inputs, target, loss)"
)
_WRITE = "write def make(): return Encoder(), torch.randn(16, 8), labels, F.cross_entropy"


@dataclass(frozen=True)
class Made:
    """A model with what it is run on.

    Args:
        model: the model.
        inputs: the batch.
        target: what the loss compares the output with; ``None`` where there is none.
        loss: the loss; ``None`` takes the model's own, or a fixed projection.
    """

    model: nn.Module
    inputs: Any
    target: Any = None
    loss: Any = None

    @property
    def batch(self) -> dict[str, Any]:
        """The batch as a run takes it, copied: a forward may write to its own."""
        return {
            "inputs": copied_batch(self.inputs),
            "target": copied_batch(self.target),
            "loss": self.loss,
        }

    @property
    def described(self) -> str:
        """The tensors of the batch, for people."""
        tensors = find_tensors(_plain(self.inputs))
        listed = [f"{str(t.dtype).removeprefix('torch.')} {tuple(t.shape)}" for t in tensors]
        return ", ".join(listed) or abbreviate(repr(self.inputs), 60)


def _plain(inputs: Any) -> Any:
    return (inputs.args, inputs.kwargs) if isinstance(inputs, Inputs) else inputs


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from a fixed seed inside, and go on as before afterwards."""
    state = random_state()
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)
    try:
        yield
    finally:
        restore_random_state(state)


def made_by(suite: ModelHealthSuite, name: str, seed: int) -> Made:
    """Return what a suite makes under `seed`.

    Args:
        suite: an instance.
        name: what it is called, for messages.
        seed: the random seed.

    Raises:
        InspectionError: it makes something else, or needs arguments.
        Exception: whatever the user's function raises, untouched.
    """
    _require_no_arguments(suite.make, name)
    with seeded(seed):
        made = _as_made(suite.make(), name)
        if any(map(is_lazy, (*made.model.parameters(), *made.model.buffers()))):
            _run_once(made)
    return made


def _run_once(made: Made) -> None:
    """Give a lazy model its parameters, as a user does before the optimizer is made."""
    inputs, was = Inputs.of(copied_batch(made.inputs)), made.model.training
    with torch.no_grad():
        made.model.eval()(*inputs.args, **inputs.kwargs)
    made.model.train(was)


def _require_no_arguments(make: Callable[..., Any], name: str) -> None:
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # of a class written in C
        return
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind not in optional
    ]  # fmt: skip
    if needed:
        raise InspectionError(
            f"{name} needs arguments ({', '.join(needed)}), and is called without any: give them "
            f"defaults, or {_WRITE}; python -m pytest_modelhealth init writes such a file"
        )


def _as_made(made: Any, name: str) -> Made:
    if isinstance(made, nn.Module):
        return _guessed(made, name)
    if not isinstance(made, tuple) or not 1 <= len(made) <= 4:
        what = f"a tuple of {len(made)}" if isinstance(made, tuple) else _described(made)
        raise InspectionError(f"{name} returned {what}: return a model, {_SHAPES}")
    if not isinstance(made[0], nn.Module):
        raise InspectionError(
            f"{name} returned a tuple that begins with {_described(made[0])}, where the model must "
            f"stand: return {_SHAPES}"
        )
    if len(made) == 1:
        return _guessed(made[0], name)
    model, inputs, *rest = made
    if len(rest) == 2:
        target, loss = rest
        if not (loss is None or _is_loss(loss)):
            raise InspectionError(
                f"{name} returned {_described(loss)} as the loss, which is the last of "
                "(model, inputs, target, loss): give a function loss(output, target)"
            )
    else:
        is_loss = bool(rest) and _is_loss(rest[0])
        target = None if is_loss or not rest else rest[0]
        loss = rest[0] if is_loss else None
    if target is not None and loss is None:
        loss = without_target
    return Made(model, inputs, target, loss)


def _is_loss(value: Any) -> bool:
    if isinstance(value, Mapping):  # a loss for each task
        return bool(value) and all(map(_is_loss, value.values()))
    return callable(value) and not isinstance(value, Tensor)


def without_target(output: Any, target: Any) -> Any:
    """Return the loss of an output where a target is given and no loss: the model's own."""
    loss = compute_loss(output, None, None)
    return torch.zeros(()) if loss is None else loss


def _guessed(model: nn.Module, name: str) -> Made:
    """Return a model with a batch that its forward takes.

    Raises:
        InspectionError: none can be guessed; the message says what to write.
    """
    from pytest_modelhealth.guessing import guess_inputs  # only where nothing is given

    guess = guess_inputs(model)
    if guess.target is not None and guess.loss is None:
        return Made(model, guess.inputs, guess.target, without_target)
    return Made(model, guess.inputs, guess.target, guess.loss)


def _described(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else f"something of type {type(value).__name__}"
