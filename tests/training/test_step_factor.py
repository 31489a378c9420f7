"""The factor between gradient and slope, measured by another way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.training.steps import X, Y, entropy, net, ran, sgd, usual


def slope(report: Any) -> Any:
    """Return what was measured, once it was."""
    found = report.observation.stepped.slope
    assert found is not None
    return found


def analytic(model: nn.Module, batch: Any = (X, Y)) -> float:
    """Return the norm of the gradient by autograd."""
    gradients = torch.autograd.grad(entropy(model, batch), list(model.parameters()))
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients))


def test_the_slope_is_that_of_autograd() -> None:
    """Gradient norm and slope, each against autograd; the losses against plain steps."""
    model = net()
    report = ran(usual, model)
    found = slope(report)
    assert found.gradient == pytest.approx(analytic(model), rel=1e-5)
    assert found.slope == pytest.approx(analytic(model), rel=2e-3)
    assert found.factor == pytest.approx(1.0, abs=2e-3)
    assert found.added == pytest.approx(found.gradient)
    optimizer = sgd(model)
    losses = [usual(model, optimizer, (X, Y)).item() for _ in range(3)]
    assert report.observation.stepped.losses == pytest.approx(losses)


def scaled(scale: float) -> Callable[[Any, Any, Any], Tensor]:
    """Return a step that descends so many times its loss."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = entropy(model, batch)
        (scale * loss).backward()
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize(
    ("scale", "verdict"), [(1024.0, "fail"), (64.0, "warn"), (1.2, ""), (0.25, "warn")]
)
def test_a_scale_is_the_factor(scale: float, verdict: str) -> None:
    """In the limits it only warns, and near 1 nothing is said."""
    model = net()
    report = ran(scaled(scale), model, sgd(model, 1e-4))
    assert slope(report).factor == pytest.approx(scale, rel=2e-3)
    found = [v for v in (*report.violations, *report.warnings) if v.check == "gradient_factor"]
    assert [v.grade for v in found] == ([verdict] if verdict else [])
    assert all(v.value == pytest.approx(scale, rel=2e-3) for v in found)


def test_the_limit_is_a_setting() -> None:
    """A factor of 64 fails under a limit of 50, and passes with the check left out."""
    model = net()
    optimizer, step = sgd(model, 1e-4), scaled(64.0)
    (found,) = ran(step, model, optimizer, settings={"max_gradient_factor": 50.0}).violations
    assert (found.check, found.limit) == ("gradient_factor", 50.0)
    left_out = ran(step, model, optimizer, settings={"skip_checks": ["gradient_factor"]})
    assert left_out.healthy
    assert not left_out.warnings


def test_a_clipped_gradient_is_no_fault() -> None:
    """Its factor is the clip's, and what backward passes left is the slope."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = entropy(model, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        return loss

    model = net()
    report = ran(step, model)
    found = slope(report)
    assert found.factor == pytest.approx(0.05 / analytic(model), rel=2e-3)
    assert found.added == pytest.approx(analytic(model), rel=1e-4)
    assert report.healthy
    assert not report.warnings


def test_what_cannot_be_measured_is_not_told() -> None:
    """A loss of noise, several losses of several optimizers."""

    def noise(model: Any, optimizer: Any, batch: Any) -> float:
        usual(model, optimizer, batch)
        with torch.no_grad():
            moved = model.into.weight.sum() * 1e6
        return float(moved.sin() + moved.cos())

    def two(model: Any, optimizer: Any, batch: Any) -> Tensor:
        losses = []
        for one in optimizer:
            one.zero_grad()
            losses.append(F.cross_entropy(model(batch[0]), batch[1]))
            losses[-1].backward()
            one.step()
        return sum(losses)

    model = net()
    for step, optimizers in ((noise, sgd(model)), (two, (sgd(model.into), sgd(model.out)))):
        assert ran(step, model, optimizers).observation.stepped.slope is None
