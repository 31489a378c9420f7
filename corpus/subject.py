"""What is judged: a model with its batch and loss, or with its training step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Draw = Callable[[int], tuple[Any, Any]]
"""Draws a batch of so many samples: inputs and target."""


@dataclass
class Subject:
    """A model with what a step of its training takes; a fault changes any part of it.

    Args:
        model: the model, in training mode unless said otherwise.
        inputs: the batch.
        target: what the loss compares the output with.
        loss: called with output and target, or with the output alone where there is no target; a
            dictionary of such; ``None`` where the model returns its loss, or has none.
        draw: draws further batches.
    """

    model: nn.Module
    inputs: Any
    target: Any = None
    loss: Any = None
    draw: Draw | None = None


@dataclass
class Training:
    """A model with a user's own training step; a fault changes any part of it.

    Args:
        model: the model.
        optimizer: its optimizer, or a tuple of several.
        step: called as ``step(model, optimizer, batch)``: does one whole training step, as a loop
            would have it, and returns the loss.
        batch: what a step is given.
        restore: what else a step changes, each with `state_dict` and `load_state_dict`: a scaler,
            a schedule, a moving average.
        batches: draws the batch of a step, by its number, for a whole training.
        steps: how many steps a whole training has.
    """

    model: nn.Module
    optimizer: Any
    step: Callable[[nn.Module, Any, Any], Any]
    batch: Any
    restore: tuple[Any, ...] = ()
    batches: Callable[[int], Any] | None = None
    steps: int = 0


Healthy = Callable[[], Any]
"""Makes a `Subject`, or a `Training`."""


def subject(model: nn.Module, draw: Draw, loss: Any, batch: int = 64) -> Subject:
    """Return the model with a batch drawn for it."""
    return Subject(model, *draw(batch), loss, draw)


_trained: dict[tuple[Callable[[], Subject], int, int], tuple[Subject, Tensor]] = {}


def trained(
    healthy: Callable[[], Subject], steps: int = 80, rate: float = 3e-3, batch: int = 64
) -> Subject:
    """Return the subject after `steps` of Adam on batches of its own, of 64 samples each.

    A run trains each subject once for each random seed; what is returned is a copy, and random
    numbers go on as if it had just been trained.
    """
    key = (healthy, steps, torch.initial_seed())
    if key not in _trained:
        fresh = healthy()
        _train(fresh, steps, rate, batch)
        _trained[key] = fresh, torch.get_rng_state()
    made, state = _trained[key]
    torch.set_rng_state(state)
    return copy.deepcopy(made)


def _train(fresh: Subject, steps: int, rate: float, batch: int) -> None:
    parameters = [p for p in fresh.model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(parameters, lr=rate)
    for _ in range(steps):
        inputs, target = fresh.draw(batch)
        optimizer.zero_grad()
        loss_of(fresh, run(fresh.model, inputs), target).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def run(model: nn.Module, inputs: Any) -> Any:
    """Call the model on a batch: a dictionary by keywords, a tuple or list by position."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def loss_of(subject: Subject, output: Any, target: Any) -> Tensor:
    """Return the loss of an output: the sum of a dictionary of losses."""
    if subject.loss is None:
        return output.loss if hasattr(output, "loss") else output
    losses = subject.loss.values() if isinstance(subject.loss, dict) else [subject.loss]
    return sum(loss(output) if target is None else loss(output, target) for loss in losses)
