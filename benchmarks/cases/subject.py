"""What a case is: a model with its batch and loss, a fault put into one, a healthy control."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

Draw = Callable[[int], tuple[Any, Any]]
"""Draws a batch of so many samples: inputs and target."""


@dataclass
class Subject:
    """What a user hands to `run_inspection`; a fault changes any part of it.

    Args:
        model: the model, in training mode unless said otherwise.
        inputs: the batch.
        target: what the loss compares the output with.
        loss: as `run_inspection` takes it.
        draw: draws further batches.
    """

    model: nn.Module
    inputs: Any
    target: Any = None
    loss: Any = None
    draw: Draw | None = None


Healthy = Callable[[], Subject]


def subject(model: nn.Module, draw: Draw, loss: Any, batch: int = 64) -> Subject:
    """Return the model with a batch drawn for it."""
    return Subject(model, *draw(batch), loss, draw)


@dataclass(frozen=True)
class Fault:
    """A fault put into a healthy subject, and what a verdict on it has to say.

    Args:
        name: what was done, in words.
        architecture: name of the healthy subject.
        build: makes the sick subject, under the current random seed.
        at: shell patterns of the layer names that are right; ``""`` is the model itself.
        by: names of the checks that may report it; empty where any may.
        words: one of them stands in the message or the cause that names the layer.
    """

    name: str
    architecture: str
    build: Healthy
    at: tuple[str, ...]
    words: tuple[str, ...]
    by: tuple[str, ...] = ()

    def is_at(self, layer: str) -> bool:
        """Whether a violation of this layer is in the right place."""
        return any(fnmatchcase(layer, pattern) for pattern in self.at)

    def is_named_in(self, text: str) -> bool:
        """Whether a text gives the right cause."""
        return any(word in text.lower() for word in self.words)


@dataclass(frozen=True)
class Control:
    """A healthy subject, on which a verdict of unhealthy is a false alarm."""

    name: str
    build: Healthy


@dataclass
class Shelf:
    """The faults and controls of one file, in the order written."""

    faults: list[Fault] = field(default_factory=list)
    controls: list[Control] = field(default_factory=list)

    def fault(
        self,
        name: str,
        healthy: Healthy,
        at: str | Iterable[str],
        words: str | Iterable[str],
        by: str | Iterable[str] = (),
    ) -> Callable[[Callable[[Subject], object]], Callable[[Subject], object]]:
        """Add the fault that the decorated function puts into a healthy subject."""

        def add(sabotage: Callable[[Subject], object]) -> Callable[[Subject], object]:
            def build() -> Subject:
                sick = healthy()
                sabotage(sick)
                return sick

            self.faults.append(
                Fault(name, healthy.__name__, build, _some(at), _some(words), _some(by))
            )
            return sabotage

        return add

    def control(self, name: str, build: Healthy) -> None:
        """Add a control."""
        self.controls.append(Control(name, build))


def _some(values: str | Iterable[str]) -> tuple[str, ...]:
    return (values,) if isinstance(values, str) else tuple(values)


_trained: dict[tuple[Healthy, int, int], Subject] = {}


def trained(healthy: Healthy, steps: int = 80, rate: float = 3e-3, batch: int = 64) -> Subject:
    """Return the subject after `steps` of Adam on batches of its own, of 64 samples each.

    A run trains each subject once for each random seed; what is returned is a copy.
    """
    key = (healthy, steps, torch.initial_seed())
    if key not in _trained:
        fresh = healthy()
        _train(fresh, steps, rate, batch)
        _trained[key] = fresh
    return copy.deepcopy(_trained[key])


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
    """Call the model as `run_inspection` does."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def loss_of(subject: Subject, output: Any, target: Any) -> Tensor:
    """Return the loss as `run_inspection` computes it."""
    if subject.loss is None:
        return output.loss if hasattr(output, "loss") else output
    losses = subject.loss.values() if isinstance(subject.loss, dict) else [subject.loss]
    return sum(loss(output) if target is None else loss(output, target) for loss in losses)
