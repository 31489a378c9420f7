"""Gradient scaling: the backward pass of mixed-precision training, reported without the scale."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler

from corpus.models.hooked import Small, x
from pytest_modelhealth import InspectionError, Inspector
from pytest_modelhealth.checks.judging import judge
from pytest_modelhealth.training import default_settings
from tests.capture.oracle import numbers, projection


def half() -> nn.Module:
    """Return a small model that is trained under fp16 autocast."""

    class Half(Small):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.float16):
                return super().forward(x)

    return Half()


def small(output: Tensor) -> Tensor:
    """A loss whose gradients fp16 holds only when they are scaled."""
    return projection(output) * 1e-6


def trained_gradients(model: nn.Module, batch: Tensor, scaler: GradScaler) -> dict[str, Tensor]:
    """Return what training would step with: the scaled backward, unscaled by the scaler."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler.scale(small(model(batch))).backward()
    scaler.unscale_(optimizer)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("init_scale", [2.0**16, 2.0**10, 1000.0])
def test_parameter_gradients_are_those_the_optimizer_sees(init_scale: float) -> None:
    """Statistics equal those of a scaled backward pass after the scaler's own `unscale_`."""
    model, batch = half(), x()
    report = Inspector(model).run_inspection(
        batch, loss=small, scaler=GradScaler("cpu", init_scale=init_scale)
    )
    expected = trained_gradients(model, batch, GradScaler("cpu", init_scale=init_scale))
    for name, gradient in expected.items():
        layer, _, own = name.rpartition(".")
        seen = report[layer].parameter_gradients[own]
        assert_statistics_close(seen, numbers([gradient]), name)
        assert seen.dtype == "float32"
    assert report.observation.errors == report.observation.notes == ()


def assert_statistics_close(seen, values, name: str) -> None:
    """Do nothing if the two agree up to float32 rounding of the division."""
    scale = abs(values).max()
    assert [seen.mean, seen.std] == pytest.approx([values.mean(), values.std()], abs=1e-6 * scale)
    assert seen.abs_max == pytest.approx(scale, rel=1e-6), name


def test_activation_gradients_survive_fp16_and_lose_the_scale() -> None:
    """A gradient too small for fp16 is seen through the scale, as in float64 without one."""

    model, batch = half(), x()
    plain = Inspector(model).run_inspection(batch, loss=small)["0"].gradients
    scaled = Inspector(model).run_inspection(batch, loss=small, scaler=GradScaler("cpu"))
    exact = Small().double()
    exact.load_state_dict(model.state_dict())
    truth = Inspector(exact).run_inspection(batch.double(), loss=small)["0"].gradients
    seen = scaled["0"].gradients
    assert seen.dtype == "float16"
    assert seen.rms == pytest.approx(truth.rms, rel=0.01)
    assert abs(plain.rms - truth.rms) > 0.01 * truth.rms  # or the scale would not be needed


def test_a_power_of_two_changes_nothing_but_the_backward_pass() -> None:
    """In float32 the report with a scaler equals the one without, the loss included."""
    model, batch = Small(), x()
    losses = []
    options = {"loss": projection, "scaler": GradScaler("cpu", init_scale=2.0**12)}

    def backward(loss: Tensor) -> None:
        losses.append(loss.item())
        loss.backward()

    scaled = Inspector(model).run_inspection(batch, backward=backward, **options)
    bare = Inspector(model).run_inspection(batch, loss=projection)
    assert losses == [bare.loss * 2.0**12]
    assert scaled.loss == bare.loss
    for layer in bare:
        for role in ("activations", "gradients"):
            seen, expected = layer.statistics(role), scaled[layer.name].statistics(role)
            assert (seen.mean, seen.std, seen.min) == (expected.mean, expected.std, expected.min)
            assert seen.exponents.counts.tolist() == expected.exponents.counts.tolist()


@pytest.mark.parametrize("used", [False, True])
def test_the_scaler_is_left_as_it_was(used: bool) -> None:
    """Its state does not change, nor whether it has begun."""
    scaler = GradScaler("cpu", init_scale=8.0)
    if used:
        scaler.scale(torch.ones(()))
    before = dict(vars(scaler))
    tensor = None if scaler._scale is None else scaler._scale.clone()
    Inspector(Small()).run_inspection(x(), scaler=scaler)
    assert all(vars(scaler)[name] is value for name, value in before.items())
    assert tensor is None or torch.equal(scaler._scale, tensor)


def test_gradients_that_overflow_under_the_scale_are_said() -> None:
    """Infinite gradients stay infinite, and a note says what the scaler would do."""
    model = half()
    report = Inspector(model).run_inspection(
        x(),
        loss=lambda out: F.mse_loss(out.float() * 1e4, torch.zeros(4, 2)),
        scaler=GradScaler("cpu", init_scale=2.0**20),
    )
    (note,) = report.observation.notes
    assert "under the loss scale of 1.04858e+06" in note
    assert "GradScaler would skip this step" in note
    assert judge(report.observation, default_settings()).violations[0].check == "finite"


def test_what_is_no_scaler_is_refused() -> None:
    """The message says what to pass."""
    with pytest.raises(InspectionError, match=r"pass the torch\.amp\.GradScaler itself"):
        Inspector(Small()).run_inspection(x(), scaler=65536.0)
