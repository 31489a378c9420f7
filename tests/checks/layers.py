"""Layers that tests of several checks are made of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Applies(nn.Module):
    """A layer that computes `function` of its input."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


class Scales(nn.Module):
    """A layer that multiplies by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor
