"""The training loop that the examples share."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


def train(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    loss: Callable[[Tensor, Tensor], Tensor],
    lr: float,
) -> None:
    """Train `model` on each batch once, with AdamW, and leave it in evaluation mode."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model.train()
    for inputs, targets in batches:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    model.eval()


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the fraction of images that `model` classifies as labelled."""
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).float().mean().item()
