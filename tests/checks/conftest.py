"""Small models, healthy and sabotaged, that the checks are held against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from corpus.checks.parts import Mlp
from pytest_modelhealth import HealthReport, Inspector
from pytest_modelhealth.report import Finding

Inspect = Callable[..., HealthReport]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def inspect() -> Inspect:
    """Run one inspection and require that none of our hooks failed."""

    def run(model: nn.Module, inputs: Any, target: Any = None, **options: Any) -> HealthReport:
        settings = options.pop("settings", {})
        report = Inspector(model, **settings).run_inspection(inputs, target, **options)
        assert report.observation.errors == ()
        return report

    return run


@pytest.fixture
def only() -> Callable[[HealthReport, str], Finding]:
    """Return the one violation of a report, which must come from the check named."""

    def get(report: HealthReport, check: str) -> Finding:
        assert [violation.check for violation in report.violations] == [check], report.violations
        return report.violations[0]

    return get


@pytest.fixture
def mlp() -> Mlp:
    """A healthy model."""
    return Mlp()


@pytest.fixture
def dead(mlp: Mlp) -> Mlp:
    """A model whose first activation never fires."""
    torch.nn.init.constant_(mlp.fc1.bias, -50.0)
    return mlp


@pytest.fixture
def batch() -> torch.Tensor:
    """Inputs for it, enough samples for every check."""
    return torch.randn(64, 16)
