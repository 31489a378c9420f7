"""What is recorded of the calls of torch's loss functions, and of losses that are scaled."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler

from corpus.models.hooked import Small, x
from pytest_modelhealth import HealthReport, Inspector
from pytest_modelhealth.capture.observing.loss_calls import _sample, see_loss
from pytest_modelhealth.report import LossCall
from pytest_modelhealth.statistics import Ledger, reduce
from tests.capture.oracle import assert_alike, numbers, projection, report_of


def seen(call, values: Tensor, target: Tensor, samples: int, **options) -> LossCall:
    """Return what is recorded of one call of a loss function."""
    value = call(values, target, **options)
    return see_loss(
        call, (values, target), options, value, layer=None, samples=samples, read=Ledger().add
    )


# rows of classes with more in front and behind than a sample holds, and classes that fill one
SHAPES = [(3, 5), (500, 7), (4, 6, 30, 20), (3, 100_000), (2, 40_000, 3)]


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_are_told_apart_whatever_their_number(shape: tuple[int, ...]) -> None:
    """Probabilities, log-probabilities and logits along dimension 1 are what they are."""
    logits = torch.randn(shape) * 3
    target = torch.zeros((shape[0], *shape[2:]), dtype=torch.int64)
    for values, kind in (
        (logits.softmax(1), "probabilities"),
        (logits.log_softmax(1), "log_probabilities"),
        (logits, ""),
    ):
        call = seen(F.cross_entropy, values, target, samples=shape[0])
        assert (call.rows, call.classes) == (kind, shape[1])
        normalizers = np.log(np.exp(values.double().numpy()).sum(1)).ravel()
        assert normalizers.min() <= call.log_normalizer + 1e-6
        assert call.log_normalizer <= np.abs(normalizers).max() + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("classes", [2, 3, 1000, 30000])
def test_few_bits_make_no_probabilities_of_small_logits(classes: int, dtype: torch.dtype) -> None:
    """A fresh head's logits are no log-probabilities, not for a batch of two; those stay some."""
    logits, target = torch.randn(2, classes), torch.zeros(2, dtype=torch.int64)
    call = seen(F.cross_entropy, (logits * 1e-3).to(dtype), target, samples=2)
    assert call.rows == ""
    call = seen(F.nll_loss, (3 * logits).to(dtype).log_softmax(1), target, samples=2)
    assert call.rows == "log_probabilities"


def test_rows_with_a_nan_anywhere_are_not_judged() -> None:
    """One NaN among millions of values, in no row of the sample, leaves the question open."""
    values = torch.randn(5000, 100).softmax(1)
    values[4999, 50] = math.nan
    call = seen(F.cross_entropy, values, torch.zeros(5000, dtype=torch.int64), samples=5000)
    assert (call.rows, call.log_normalizer) == ("", None)
    assert math.isnan(call.value)


def test_padding_of_many_sequences_is_estimated_from_some() -> None:
    """Half of each of a thousand sequences is padding, which a sample of them shows."""
    target = torch.randint(1, 20, (1000, 40))
    target[:, 20:] = 0
    call = seen(F.cross_entropy, torch.randn(40_000, 20), target.flatten(), samples=1000)
    assert (call.targets.tail, call.targets.tail_share) == (0, 0.5)


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("first", [0.5, math.nan, math.inf])
def test_value_is_the_mean_as_torch_has_it(reduction: str, first: float) -> None:
    """Of losses that are not reduced too, finite or not."""
    values, target = torch.randn(8), torch.zeros(8)
    values[0] = first
    call = seen(F.mse_loss, values, target, samples=8, reduction=reduction)
    expected = F.mse_loss(values, target).item()
    assert call.value == pytest.approx(expected, rel=1e-6, nan_ok=True)


def of_output(output: Tensor, *losses: Callable[[Tensor], Tensor]) -> HealthReport:
    """Return the report of a model that returns this, and of these losses one after the other."""

    def loss(output: Tensor) -> Tensor:
        return torch.stack([one(output) for one in losses]).sum()

    return Inspector(nn.Identity()).run_inspection(output, loss=loss, backward=False)


@pytest.mark.parametrize("made_as", [(6, 10), (60,)])
def test_what_was_found_in_an_output_holds_for_its_views(made_as: tuple[int, ...]) -> None:
    """Under the view's shape, and not of a part, of another order or after a write.

    The output may be a view itself, as that of a linear layer on three dimensions is.
    """
    for shape in ((12, 5), (3, 4, 5), (60,)):
        output = torch.randn(made_as)
        output = output if output.ndim == 2 else output.view(6, 10)
        output[2, 3] = math.nan
        expected = reduce(output.view(shape).clone())
        report = of_output(output, lambda y, shape=shape: F.mse_loss(y.view(shape), y.view(shape)))
        (call,) = report.observation.loss_calls
        assert call.input.exponents is report[""].activations.exponents
        assert (call.input.shape, call.input.count, call.input.units) == (shape, 60, None)
        assert call.input.first_nonfinite == expected.first_nonfinite
        assert (call.input.mean, call.input.max) == (expected.mean, expected.max)
    zeros = torch.zeros(made_as)
    report = of_output(
        zeros if zeros.ndim == 2 else zeros.view(6, 10),
        lambda y: F.mse_loss(y.view(-1)[:30], y.view(-1)[:30]),
        lambda y: F.mse_loss(y.t(), y.t()),
        lambda y: F.mse_loss(y.add_(2.0).view(-1), y.view(-1)),
    )
    given = [call.input for call in report.observation.loss_calls]
    assert [(s.count, s.shape, s.mean) for s in given] == [
        (30, (30,), 0.0),
        (60, (10, 6), 0.0),
        (60, (60,), 2.0),
    ]


@pytest.mark.parametrize("rows", [64, 1024])
def test_what_is_copied_of_a_large_input_does_not_grow_with_its_rows(rows: int) -> None:
    """Beyond the statistics a few rows are looked at."""
    sample = _sample(torch.randn(rows, 8000), 1)
    assert sample is not None
    assert sample.shape == (8, 8000)


# ---- gradient scaling ----------------------------------------------------------------------------


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
