"""Small models, and steps that train them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth import HealthReport, Inspector

Step = Callable[[Any, Any, Any], Any]

_DRAWN = torch.Generator().manual_seed(0)
X = torch.randn(16, 6, generator=_DRAWN)
Y = torch.randint(0, 3, (16,), generator=_DRAWN)


class Net(nn.Module):
    """A perceptron whose parts have names."""

    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.into = nn.Linear(6, 8)
        self.between = nn.Sequential(*between, nn.Tanh())
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores."""
        return self.out(self.between(self.into(x)))


def net(*between: nn.Module) -> Net:
    """Return a model under a seed."""
    torch.manual_seed(0)
    return Net(*between)


def sgd(model: nn.Module, rate: float = 0.1, **options: Any) -> torch.optim.SGD:
    """Return plain descent of all parameters."""
    return torch.optim.SGD(model.parameters(), lr=rate, **options)


def usual(model: Any, optimizer: Any, batch: Any) -> Tensor:
    """Make one step as every tutorial has it."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss


def entropy(model: Any, batch: Any) -> Tensor:
    """Return the loss of `usual`."""
    return F.cross_entropy(model(batch[0]), batch[1])


def ran(
    step: Step | None = usual,
    model: nn.Module | None = None,
    optimizer: Any = None,
    batch: Any = (X, Y),
    *,
    settings: dict[str, Any] | None = None,
    **arguments: Any,
) -> HealthReport:
    """Run a step on a model, by default the small one under plain descent."""
    model = net() if model is None else model
    optimizer = sgd(model) if optimizer is None else optimizer
    return Inspector(model, **settings or {}).run_step(step, optimizer, batch, **arguments)


def said(report: HealthReport, severity: str | None = None) -> list[tuple[str, str, str]]:
    """Return check, layer and message of what a report has, by severity if one is given."""
    found = {"fail": report.violations, "warn": report.warnings}
    kinds = found if severity is None else {severity: found[severity]}
    return [(v.check, v.layer, v.message) for kind in kinds.values() for v in kind]
