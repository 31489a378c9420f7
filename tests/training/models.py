"""A small model, its batches and a training loop, for the tests of the monitor."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth.training.monitoring.monitor import TrainingMonitor


class Net(nn.Module):
    """Linear layers, a normalisation, a functional ReLU and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(8, 16), nn.BatchNorm1d(16)
        self.drop, self.b = nn.Dropout(0.3), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.drop(F.relu(self.norm(self.a(x)))))


def net() -> Net:
    """Return a new model, the same each time."""
    torch.manual_seed(0)
    return Net()


def batch(number: int = 0, size: int = 32) -> tuple[Tensor, Tensor]:
    """Return the batch of this number."""
    generator = torch.Generator().manual_seed(number)
    return (
        torch.randn(size, 8, generator=generator),
        torch.randint(0, 4, (size,), generator=generator),
    )


def loss_of(model: nn.Module, number: int = 0) -> Tensor:
    """Return the loss of a model on the batch of this number, after the same random numbers."""
    torch.manual_seed(number)
    x, y = batch(number)
    return F.cross_entropy(model(x), y)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer for all parameters of a model."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(
    model: nn.Module,
    monitor: TrainingMonitor | None = None,
    steps: int = 4,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    after: Callable[[int], object] = lambda step: None,
) -> None:
    """Train a model; `after` is called after the optimizer, before the step is over."""
    optimizer = optimizer or adam(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        after(step)
        if monitor is not None:
            monitor.step_end(step, loss=loss)


def values(model: nn.Module) -> list[bytes]:
    """Return parameters and buffers, bit for bit."""
    return [tensor.numpy().tobytes() for tensor in model.state_dict().values()]


def trained(**options: object) -> list[bytes]:
    """Return what a bare training makes of the model."""
    model = net()
    train(model, **options)  # type: ignore[arg-type]
    return values(model)
