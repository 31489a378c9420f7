"""Runs of training steps, on the small models of the corpus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from corpus.checks.steps import X, Y, entropy, net, sgd, usual
from pytest_modelhealth import HealthReport, Inspector

__all__ = ["X", "Y", "entropy", "net", "objections", "ran", "sgd", "usual"]

Step = Callable[[Any, Any, Any], Any]


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


def objections(report: HealthReport) -> dict[str, str]:
    """Return how each check grades what it objects to."""
    return {v.check: v.grade for v in (*report.warnings, *report.violations)}
