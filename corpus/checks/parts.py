"""Layers that models of several checks are made of."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import nn


class Net(nn.Module):
    """Layers by their names, and what is done with them: a function of the model and its inputs.

    Two sizes are a linear layer, and a tensor that is no parameter is a buffer.
    """

    def __init__(self, function: Callable[..., Any], **layers: Any) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            layer = nn.Linear(*layer) if isinstance(layer, tuple) else layer
            is_buffer = isinstance(layer, torch.Tensor) and not isinstance(layer, nn.Parameter)
            (self.register_buffer if is_buffer else self.__setattr__)(name, layer)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


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


class Mlp(nn.Module):
    """Three linear layers with ReLU between them."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.fc1 = nn.Linear(16, width)
        self.act1 = nn.ReLU()
        self.fc2 = nn.Linear(width, width)
        self.act2 = nn.ReLU()
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.act2(self.fc2(self.act1(self.fc1(x)))))


def batch(*shape: int) -> torch.Tensor:
    """Return numbers of variance 1: 64 samples of 16 features, unless a shape is given."""
    return torch.randn(shape or (64, 16))


def holding(module: nn.Module, **values: Any) -> Any:
    """Return a module after filling what these names stand for, or doing this to it."""
    with torch.no_grad():
        for name, value in values.items():
            tensor = attrgetter(name)(module)
            value(tensor) if callable(value) else tensor.fill_(value)
    return module


def scaled(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what multiplies weights."""
    return lambda weight: weight.mul_(factor)


def normal(std: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what draws weights from a normal distribution."""
    return lambda weight: weight.normal_(0.0, std)
