"""Activations and clamps before a loss that takes logits: found by the `loss` check."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from corpus.checks.parts import Applies

CUT = {
    "relu": F.relu,
    "relu in place": lambda x: x.relu_(),
    "relu, reshaped": lambda x: F.relu(x).unsqueeze(-1).squeeze(-1).contiguous(),
    "relu by a clamp": lambda x: x.clamp(min=0),
    "relu6": F.relu6,
    "clamp": lambda x: x.clamp(-1, 1),
    "a near bound that is met": lambda x: (20 * x).clamp(-5, 30),
    "hardtanh": F.hardtanh,
    "tanh": torch.tanh,
}
FREE = {
    "nothing": lambda x: x,
    "soft cap": lambda x: 30 * torch.tanh(x / 30),
    "distances": lambda x: -torch.cdist(x, torch.eye(10)),
    "squared distances": lambda x: -(x.square()),
    "a guard": lambda x: (20 * x).clamp(-30, 30),
    "a guard that is met": lambda x: (200 * x).clamp(-30, 30),
    "a bound that is not met": lambda x: x.clamp(max=9),
    "masked": lambda x: x.masked_fill(torch.arange(10) > 8, -torch.inf).clamp(min=-1e4),
    "leaky": F.leaky_relu,
    "log-probabilities": lambda x: F.log_softmax(x, 1),
    "floored log-probabilities": lambda x: F.softmax(x, 1).clamp(min=1e-8).log(),
}


def of_loss(report):
    """What the check says, and with which severity."""
    told = (*report.violations, *report.warnings)
    return [(v.grade, v.message) for v in told if v.check == "loss"]


@pytest.fixture
def run(mlp, batch, inspect):
    """Inspect a model that ends in a function, under cross-entropy."""

    def run(function):
        model = nn.Sequential(mlp, Applies(function))
        labels = torch.randint(0, 9, (64,))
        return inspect(model, batch, labels, loss=F.cross_entropy)

    return run


@pytest.mark.parametrize("function", CUT.values(), ids=CUT)
def test_logits_that_are_cut_off(function, run):
    """Logits that lost a side, or lie too near each other, are a fault."""
    ((severity, message),) = of_loss(run(function))
    assert severity == "fail"
    assert "takes logits and is given" in message


@pytest.mark.parametrize("function", FREE.values(), ids=FREE)
def test_logits_that_are_free(function, run):
    """Soft caps, distances and guards far out are logits."""
    assert [one for one in of_loss(run(function)) if "takes logits" in one[1]] == []


def test_what_the_bounds_allow(run):
    """The largest probability that logits from -1 to 1 allow is said."""
    (violation,) = run(torch.tanh).violations
    assert "no class can get more than 45%" in violation.cause  # 1 / (1 + 9 exp(-2))


@pytest.mark.parametrize(
    ("function", "severity"),
    [(F.relu, "fail"), (lambda x: x.clamp(min=0), "fail"), (F.softplus, None), (None, None)],
)
def test_binary(function, severity, batch, inspect):
    """A ReLU before binary cross-entropy leaves probabilities of a half and more."""
    head = nn.Linear(16, 1)
    model = head if function is None else nn.Sequential(head, Applies(function))
    target = torch.randint(0, 2, (64, 1)).float()
    report = inspect(model, batch, target, loss=F.binary_cross_entropy_with_logits)
    assert [one for one, _ in of_loss(report)] == ([] if severity is None else [severity])
