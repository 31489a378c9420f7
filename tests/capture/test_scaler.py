"""Gradient scaling: the backward pass of mixed-precision training, reported without the scale."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler

from corpus.models.hooked import Small, x
from tests.capture.oracle import assert_alike, numbers, projection, report_of


class Half(Small):
    """A small model that is trained under fp16 autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return super().forward(x)


def small(output: Tensor) -> Tensor:
    """A loss whose gradients fp16 holds only when they are scaled."""
    return projection(output) * 1e-6


@pytest.mark.parametrize("init_scale", [2.0**16, 2.0**10, 1000.0])
def test_parameter_gradients_are_those_the_optimizer_sees(init_scale: float) -> None:
    """Statistics equal those of a scaled backward pass after the scaler's own `unscale_`."""
    model, batch = Half(), x()
    report = report_of(model, batch, loss=small, scaler=GradScaler("cpu", init_scale=init_scale))
    scaler = GradScaler("cpu", init_scale=init_scale)
    scaler.scale(small(model(batch))).backward()
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.0))
    for name, parameter in model.named_parameters():
        layer, _, own = name.rpartition(".")
        seen, values = report[layer].parameter_gradients[own], numbers([parameter.grad])
        scale = abs(values).max()  # up to float32 rounding of the division
        expected = [values.mean(), values.std(), scale]
        assert [seen.mean, seen.std, seen.abs_max] == pytest.approx(expected, abs=1e-6 * scale)
        assert seen.dtype == "float32"
    assert report.observation.notes == ()


def test_activation_gradients_survive_fp16_and_lose_the_scale() -> None:
    """A gradient too small for fp16 is seen through the scale, as in float64 without one."""
    model, batch = Half(), x()
    plain = report_of(model, batch, loss=small)["0"].gradients
    seen = report_of(model, batch, loss=small, scaler=GradScaler("cpu"))["0"].gradients
    exact = Small().double()
    exact.load_state_dict(model.state_dict())
    truth = report_of(exact, batch.double(), loss=small)["0"].gradients
    assert seen.dtype == "float16"
    assert seen.rms == pytest.approx(truth.rms, rel=0.01)
    assert abs(plain.rms - truth.rms) > 0.01 * truth.rms  # or the scale would not be needed


@pytest.mark.parametrize("enabled", [False, True])
def test_a_power_of_two_changes_nothing_but_the_backward_pass(enabled: bool) -> None:
    """In float32 the report with a scaler equals the one without, the loss included.

    So it does with one that is off, the usual switch of a training script.
    """
    model, batch, losses = Small(), x(), []

    def backward(loss: Tensor) -> None:
        losses.append(loss.item())
        loss.backward()

    scaler = GradScaler("cpu", init_scale=2.0**12, enabled=enabled)
    scaled = report_of(model, batch, backward=backward, scaler=scaler)
    bare = report_of(model, batch)
    assert losses == [bare.loss * (2.0**12 if enabled else 1.0)]
    assert scaled.loss == bare.loss
    assert_alike(scaled, bare)


@pytest.mark.parametrize("used", [False, True])
def test_the_scaler_is_left_as_it_was(used: bool) -> None:
    """Its state does not change, nor whether it has begun."""
    scaler = GradScaler("cpu", init_scale=8.0)
    if used:
        scaler.scale(torch.ones(()))
    before = dict(vars(scaler))
    tensor = None if scaler._scale is None else scaler._scale.clone()
    report_of(Small(), x(), scaler=scaler)
    assert all(vars(scaler)[name] is value for name, value in before.items())
    assert tensor is None or torch.equal(scaler._scale, tensor)


def test_gradients_that_overflow_under_the_scale_are_said() -> None:
    """Infinite gradients stay infinite, and a note says what the scaler would do."""
    report = report_of(
        nn.Sequential(Half()),
        x(),
        loss=lambda out: F.mse_loss(out.float() * 1e4, torch.zeros(4, 2)),
        scaler=GradScaler("cpu", init_scale=2.0**20),
    )
    (note,) = report.observation.notes
    assert "under the loss scale of 1.04858e+06" in note
    assert "GradScaler would skip this step" in note
    assert report.violations[0].check == "finite"
