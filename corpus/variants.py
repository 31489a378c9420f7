"""What can be done with any subject: training, evaluation mode, bfloat16, another batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.subject import Draw, Healthy, Subject, subject, trained


def with_model(build: Callable[[], nn.Module], draw: Draw, loss: Any, batch: int = 64) -> Healthy:
    """Return a function that makes the subject anew."""
    return lambda: subject(build(), draw, loss, batch)


def after_training(healthy: Healthy, steps: int = 80, rate: float = 3e-3) -> Healthy:
    return lambda: trained(healthy, steps, rate)


def evaluated(healthy: Healthy) -> Healthy:
    """Return the subject in evaluation mode."""

    def build() -> Subject:
        made = healthy()
        made.model.eval()
        return made

    return build


def of_batch(healthy: Healthy, n: int) -> Healthy:
    """Return the subject with a batch of `n` samples."""

    def build() -> Subject:
        made = healthy()
        made.inputs, made.target = made.draw(n)
        return made

    return build


def as_bfloat16(healthy: Healthy) -> Healthy:
    """Return the subject with its floating tensors in bfloat16."""

    def build() -> Subject:
        made = healthy()
        made.model.bfloat16()
        made.inputs, made.target = _bfloat16(made.inputs), _bfloat16(made.target)
        return made

    return build


def _bfloat16(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.bfloat16() if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(map(_bfloat16, value))
    return {name: _bfloat16(part) for name, part in value.items()} if value is not None else None


def changed(healthy: Healthy, change: Callable[[Subject], object]) -> Healthy:
    """Return the subject after `change`, which keeps it healthy."""

    def build() -> Subject:
        made = healthy()
        change(made)
        return made

    return build


def from_transformers(name: str) -> Healthy:
    """Return an architecture of transformers, small, with the random projection as loss."""

    def build() -> Subject:
        from corpus.models.architectures import ARCHITECTURES

        case = ARCHITECTURES[name]
        return Subject(case.build(), case.inputs())

    return build


def _after_steps(healthy: Healthy) -> Healthy:
    return lambda: trained(healthy, 20, batch=16)


def add_each(shelf: Shelf, *designs: Healthy, with_evaluation: bool = True) -> None:
    """Add each design initialised, trained, and trained in evaluation mode."""
    for healthy in designs:
        name = healthy.__name__
        shelf.control(f"{name}, initialised", healthy)
        shelf.control(f"{name}, trained", _after_steps(healthy))
        if with_evaluation:
            shelf.control(f"{name}, trained, in evaluation", evaluated(_after_steps(healthy)))
