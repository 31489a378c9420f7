"""What several of the healthy training steps use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.cards import Shelf
from corpus.subject import Training

Build = Callable[[], Training]


def controls_of(shelf: Shelf) -> Callable[[str], Callable[[Build], Build]]:
    """Return a decorator that adds the training which a function makes to the shelf."""

    def control(name: str) -> Callable[[Build], Build]:
        def add(build: Build) -> Build:
            shelf.control(name, build)
            return build

        return add

    return control


class Count:
    """Counts calls, and can be put back."""

    def __init__(self, value: int = 0) -> None:
        self.value = value

    def up(self) -> int:
        """Count one more, and return how many there were before."""
        self.value += 1
        return self.value - 1

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


def entropy(model: nn.Module, batch: Any) -> Tensor:
    """Return the cross entropy of inputs and labels."""
    x, y = batch
    return F.cross_entropy(model(x), y)


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    """Clear, go back and step; return the loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def usual(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    """Do one step of classification as every tutorial has it."""
    return descend(optimizer, entropy(model, batch))


def trained(model: nn.Module, batches: Callable[[int], Any], steps: int = 60) -> nn.Module:
    """Return the classifier after some steps of Adam on batches of 32."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        usual(model, optimizer, batches(32))
    optimizer.zero_grad()
    return model


def backbone(model: nn.Module) -> nn.Module:
    """Return a model that is frozen and in evaluation for good."""
    return model.requires_grad_(False).eval()
