"""Models of snapshots, and edits of them that change the form or the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize


class Recurrent(nn.Module):
    """A recurrent layer, twice the same activation, a norm of weights, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.relu, self.relu_again = nn.ReLU(), None
        self.fc = parametrizations.weight_norm(nn.Linear(8, 8))
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.lowest = -math.inf

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.lstm.batch_first else x.transpose(0, 1)
        states = self.lstm(x)[0]
        states = states if self.lstm.batch_first else states.transpose(0, 1)
        future = torch.ones(states.shape[1], states.shape[1], dtype=torch.bool).triu(1)
        scores = (states @ states.mT).masked_fill(future, self.lowest)
        x = self.fc(self.relu((torch.softmax(scores, -1) @ states)[:, -1]))
        return self.head(self.norm((self.relu_again or self.relu)(x)))


def time_first(model: Recurrent) -> None:
    """Let the recurrent layer take steps before samples."""
    model.lstm.batch_first = False


def two_activations(model: Recurrent) -> None:
    """Let a second module compute the second activation."""
    model.relu_again = nn.ReLU()


def without_weight_norm(model: Recurrent) -> None:
    """Keep the weight itself."""
    parametrize.remove_parametrizations(model.fc, "weight")


def finite_mask(model: Recurrent) -> None:
    """Mask by a large number."""
    model.lowest = -1e9


def zero_bias() -> nn.Sequential:
    """Return a net whose head starts without an offset."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 3))
    nn.init.zeros_(model[2].weight)
    nn.init.zeros_(model[2].bias)
    return model


class Branch(nn.Module):
    """A net with a branch that adds nothing yet."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.stem, self.norm, self.branch, self.head = model

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        return self.head(x if self.branch is None else x + self.branch(x))


def without_statistics(norm: nn.BatchNorm1d) -> nn.BatchNorm1d:
    """Return the norm without running statistics, which training does not show."""
    made = nn.BatchNorm1d(8, track_running_stats=False)
    made.load_state_dict({"weight": norm.weight, "bias": norm.bias})
    return made


class Tower(nn.Module):
    """Two layers with a norm and a residual, whose parts the tests change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.second = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)
        self.residual = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.residual * x + self.second(torch.relu(self.norm(x)))
        return self.head(x)


class Wrapped(nn.Module):
    """A model around another, with an Identity in front."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.front = nn.Identity()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.front(x))


class Bare(nn.Module):
    """A model of no layers, which computes `function` of its input."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Convolutional(nn.Module):
    """Two blocks with batch norm; the bias before it has a gradient of nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.fc1 = nn.Linear(8 * 36, 32)
        self.fc2 = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))
