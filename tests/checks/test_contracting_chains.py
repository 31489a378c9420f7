"""Gradients that vanish along bounded activations, a part at each."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn


class Chain(nn.Module):
    """Linear layers with an activation after each."""

    def __init__(self, count, activation, init=None, width=32, around=None):
        super().__init__()
        sizes = [16] + [width] * count
        self.layers = nn.ModuleList(nn.Linear(sizes[i], sizes[i + 1]) for i in range(count))
        self.head, self.activation, self.around = nn.Linear(width, 3), activation, around
        for layer in self.layers if init else ():
            init(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x):
        for layer in self.layers:
            made = self.activation(layer(x))
            x = self.around(x, made) if self.around and x.shape == made.shape else made
        return self.head(x)


@pytest.fixture
def told(inspect):
    """Return what is said of gradients in a model that classifies."""

    def run(model, severity="fail", **options):
        target = torch.randint(3, (64,))
        report = inspect(model, torch.randn(64, 16), target, loss=F.cross_entropy, **options)
        found = report.violations if severity == "fail" else report.warnings
        return [v for v in found if v.check == "grad_norm"]

    return run


@pytest.mark.parametrize("activation", [torch.sigmoid, nn.Sigmoid()], ids=["function", "module"])
def test_sigmoids_in_a_row_are_found(activation, told):
    """At torch's initialisation, which is no fault by itself: the factor a layer is told."""
    (found,) = told(Chain(6, activation))
    assert found.layer == "layers.0"
    assert found.limit == 1e-4
    assert 1e-7 < found.value < 1e-4
    assert "times a layer over" in found.cause
    assert "sigmoid (a slope of 0.25 at most)" in found.cause


def test_better_weights_take_one_layer_more(told):
    """A sigmoid takes three quarters whatever the weights."""
    assert told(Chain(6, torch.sigmoid, nn.init.xavier_uniform_)) != []


def test_longer_chains_are_told_once(told):
    """Not for each layer that nothing reaches."""
    assert len(told(Chain(12, torch.sigmoid))) == 1


@pytest.mark.parametrize(
    "model",
    [
        Chain(4, torch.sigmoid),
        Chain(5, torch.sigmoid, nn.init.xavier_uniform_),
        Chain(20, torch.tanh, nn.init.xavier_uniform_),
        Chain(5, torch.sigmoid, nn.init.xavier_uniform_, 256),
        Chain(4, torch.sigmoid, lambda weight: nn.init.normal_(weight, std=0.05)),
        Chain(6, torch.sigmoid, around=torch.add),
        Chain(14, torch.sigmoid, around=lambda x, made: made * x),
        Chain(8, nn.Sequential(nn.BatchNorm1d(32), nn.Sigmoid())),
        Chain(12, lambda x: torch.sigmoid(F.layer_norm(x, (32,)))),
        Chain(8, torch.relu),
        Chain(8, F.gelu, nn.init.kaiming_normal_),
    ],
    ids=[
        "short",
        "short, Xavier",
        "tanh",
        "wide",
        "small weights",
        "residual",
        "gates",
        "normalised",
        "by a function",
        "relu",
        "gelu",
    ],
)
def test_healthy_chains_are_left_alone(model, told):
    """Few layers, slopes near one, residuals and normalisations."""
    assert told(model) == told(model, "warn") == []


def test_trained_chain_is_not_judged(told):
    """What training made of it is another matter."""
    model = Chain(6, torch.sigmoid)
    with torch.no_grad():
        model.head.bias += 1.0
    assert told(model) == []
