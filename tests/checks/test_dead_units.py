"""The `dead_units` check: activations most of whose units never fire."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn


def kill(layer, fraction=1.0):
    """Hold part of a layer's units on the flat side of the activation after it."""
    with torch.no_grad():
        layer.bias[: round(fraction * len(layer.bias))] = -50.0


def test_dead_layer_is_named_with_its_cause(mlp, batch, inspect, only):
    """The activation is the culprit; the layer that holds it down is in the cause."""
    kill(mlp.fc1)
    violation = only(inspect(mlp, batch), "dead_units")
    assert (violation.layer, violation.role) == ("act1", "activations")
    assert (violation.value, violation.limit, violation.origin) == (1.0, 0.8, "default")
    assert "'fc1'" in violation.cause
    assert "bias" in violation.cause


@pytest.mark.parametrize(
    ("fraction", "limit", "healthy"), [(0.5, 0.6, True), (0.5, 0.4, False), (0.75, 0.75, True)]
)
def test_limit_is_the_largest_fraction_allowed(fraction, limit, healthy, batch, inspect):
    """A dead fraction equal to its limit passes; `value` is the true fraction."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    with torch.no_grad():
        model[0].bias.fill_(50.0)
    kill(model[0], fraction)
    report = inspect(model, batch, settings={"max_dead_fraction": limit})
    assert report["1"].activations.dead_fraction == fraction
    assert report.healthy is healthy


@pytest.mark.parametrize("function", ["relu", "gelu", "silu", "hardswish", "mish", "softplus"])
def test_every_activation_with_a_flat_side_can_die(function, batch, inspect, only):
    """Functional activations are judged like modules, smooth ones like ReLU."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.head = nn.Linear(16, 32), nn.Linear(32, 4)

        def forward(self, x):
            return self.head(getattr(F, function)(self.fc(x)))

    model = Model()
    assert inspect(model, batch).healthy
    kill(model.fc)
    report = inspect(model, batch)
    assert report.violations[0].check == "dead_units"
    assert report.violations[0].layer == function


def test_activation_without_a_flat_side_does_not_die(batch, inspect):
    """LeakyReLU passes a gradient on both sides."""
    model = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(), nn.Linear(32, 4))
    kill(model[0])
    assert inspect(model, batch).healthy


@pytest.mark.parametrize("samples", [2, 4])
def test_few_samples_are_inconclusive(samples, mlp, batch, inspect):
    """Two or four samples say nothing about units; the reason says how many would."""
    kill(mlp.fc1)
    report = inspect(mlp, batch[:samples])
    assert report.verdict == "inconclusive"
    (finding,) = report.judgement.inconclusive
    assert finding.layer == "act1"
    assert "at least 32" in finding.reason
    report.assert_healthy()


def test_tokens_are_samples_but_pixels_are_not(inspect):
    """A sequence of 64 tokens is evidence; one image of 64 pixels is not."""
    tokens = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))
    kill(tokens[0])
    assert inspect(tokens, torch.randn(1, 64, 16)).verdict == "unhealthy"
    pixels = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1))
    kill(pixels[0])
    assert inspect(pixels, torch.randn(1, 3, 8, 8)).verdict == "inconclusive"
    assert inspect(pixels, torch.randn(32, 3, 8, 8)).verdict == "unhealthy"


def test_channels_are_the_units_of_a_convolution(inspect):
    """One dead channel of four is a quarter, however many pixels it has."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    with torch.no_grad():
        model[1].bias[0] = -50.0
    assert inspect(model, torch.randn(32, 3, 8, 8))["2"].activations.dead_fraction == 0.25


def test_dead_in_one_batch_but_not_in_another_is_alive(inspect, batch):
    """A unit is dead only if it is dead over all batches."""
    from pytest_modelhealth import Inspector

    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU())
    with torch.no_grad():
        model[0].weight.uniform_(0.5, 1.5)
        model[0].bias.fill_(0.0)
    inspector = Inspector(model)
    negative, positive = -batch.abs(), batch.abs()
    assert not inspector.run_inspection(negative).healthy
    assert inspector.run_batches([negative, positive]).healthy
    assert not inspector.run_batches([negative, negative]).healthy


@pytest.mark.parametrize("depth", [5, 20])
def test_deep_plain_relu_network_is_healthy_when_initialised(depth, inspect):
    """Samples line up in a deep ReLU network, so that about half the units are off for all."""
    for seed in range(5):
        torch.manual_seed(seed)
        layers = [m for _ in range(depth) for m in (nn.Linear(64, 64), nn.ReLU())]
        report = inspect(nn.Sequential(*layers), torch.rand(64, 64))
        assert not [v for v in report.violations if v.check == "dead_units"]
