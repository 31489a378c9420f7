"""Data sets that are loaded by workers, and models whose numbers depend on the mode."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Samples and labels, which may raise or draw random numbers."""

    def __init__(self, count: int = 100, bad: int = -1, draws: bool = False) -> None:
        self.x = torch.randn(count, 6, generator=torch.Generator().manual_seed(1))
        self.bad, self.draws = bad, draws

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self.bad:
            raise ZeroDivisionError("a sample of mine")
        drawn = random.random() + np.random.rand() + torch.rand(1) if self.draws else 0.0
        return self.x[index] + drawn, torch.tensor(index % 3)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The same without a length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        whole = Numbers()
        yield from (whole[index] for index in range(100))


def net() -> nn.Sequential:
    """Return a model with what depends on the mode."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3)).append(
        nn.Linear(8, 3)
    )


class Frozen(nn.Module):
    """Keeps its norm in evaluation mode whatever is asked, and takes notes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.calls = nn.BatchNorm1d(6), 0

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        self.norm.weight.data += 1.0
        self.norm.requires_grad_(False)
        self.calls += 1
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Turned(nn.Module):
    """Its first layer has time before the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.head = nn.Linear(6, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x.transpose(0, 1)).mean(0))
