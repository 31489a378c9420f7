"""The `saturation` check: bounded activations and softmax held where they are flat."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_modelhealth import Inspector


class Bounded(nn.Module):
    """A bounded function between two linear layers."""

    def __init__(self, function):
        super().__init__()
        self.fc, self.head = nn.Linear(16, 32), nn.Linear(32, 4)
        self.function = function

    def forward(self, x):
        return self.head(self.function(self.fc(x)))


def objections(report):
    """The violations of the check, as roots or consequences of what makes the inputs large."""
    told = [v for root in report.violations for v in (root, *root.folded)]
    return [violation for violation in told if violation.check == "saturation"]


def found(report):
    """The layers that the check objects to."""
    return {violation.layer for violation in objections(report)}


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "hardtanh", "hardsigmoid", "relu6"])
def test_every_bounded_function_can_saturate(name, batch, inspect):
    """Weights a thousand times too large are found, and named as the cause; healthy ones pass."""
    model = Bounded(getattr(F, name))
    assert inspect(model, batch).healthy
    with torch.no_grad():
        model.fc.weight.mul_(1000.0)
        if name == "relu6":
            model.fc.bias.fill_(5000.0)
    (violation,) = objections(inspect(model, batch))
    assert violation.layer == name
    assert "'fc'" in violation.cause


@pytest.mark.parametrize(("limit", "violated"), [(0.4, True), (0.6, False)])
def test_value_is_the_part_that_is_flat(limit, violated, inspect):
    """Half of the inputs are at 100, the others at 0.5: by hand, one half is saturated."""
    model = Bounded(torch.tanh)
    with torch.no_grad():
        model.fc.weight.zero_()
        model.fc.bias.copy_(torch.tensor([100.0, -100.0, 0.5, -0.5]).repeat(8))
    report = inspect(model, torch.randn(64, 16), settings={"max_saturated_fraction": limit})
    assert ("tanh" in found(report)) is violated
    for violation in objections(report):
        assert violation.value == 0.5
        assert "bias" in violation.cause


def test_large_inputs_are_named_as_the_cause(inspect):
    """Raw values into a sane layer: the inputs are to be normalised."""
    report = inspect(Bounded(torch.tanh), 1e4 * torch.randn(64, 16))
    (violation,) = objections(report)
    assert "normalise" in violation.cause


def test_few_samples_are_inconclusive(inspect, batch):
    """Four samples say little about a layer."""
    model = Bounded(torch.tanh)
    with torch.no_grad():
        model.fc.weight.mul_(1000.0)
    report = inspect(model, batch[:4])
    assert "saturation" in {finding.check for finding in report._judgement.inconclusive}
    assert not found(report)


def test_output_may_be_sure_of_itself(batch, inspect):
    """What no trainable layer follows is the model's answer: a head beside it changes nothing."""

    class ActorCritic(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Linear(16, 16)
            self.policy, self.value = nn.Linear(16, 4), nn.Linear(16, 1)

        def forward(self, x):
            h = F.relu(self.trunk(x))
            return torch.softmax(self.policy(h), -1), torch.sigmoid(1e4 * self.value(h))

    model = ActorCritic()
    with torch.no_grad():
        model.policy.weight.mul_(1e4)
    assert not found(inspect(model, batch))


class Attention(nn.Module):
    """Causal self-attention over 16 tokens of width 64, then a linear layer."""

    def __init__(self, *, scale, fused, mask=-math.inf):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))
        self.out = nn.Linear(64, 8)
        self.scale, self.fused, self.mask = scale, fused, mask
        for layer in (self.q, self.k):
            nn.init.orthogonal_(layer.weight, 2.0)

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.fused:
            h = F.scaled_dot_product_attention(q, k, v, scale=self.scale, is_causal=True)
        else:
            later = torch.ones(16, 16).triu(1).bool()
            scores = q @ k.transpose(-1, -2) * self.scale
            h = torch.softmax(scores.masked_fill(later, self.mask), -1) @ v
        return self.out(h)


@pytest.mark.parametrize("mask", [-math.inf, -1e4, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("fused", [False, True])
def test_attention_collapsed_to_one_hot(fused, mask, inspect):
    """Without 1/sqrt(d), written out or fused, each output is one value; a mask changes nothing."""
    tokens = 1.5 * torch.randn(8, 16, 64)
    assert not found(inspect(Attention(scale=64**-0.5, fused=fused, mask=mask), tokens))
    report = inspect(Attention(scale=8.0, fused=fused, mask=mask), tokens)
    layer = "scaled_dot_product_attention" if fused else "softmax"
    assert found(report) == {layer}
    assert "sqrt(d)" in objections(report)[0].cause


def test_one_hot_value_is_the_mean_sum_of_squares(inspect):
    """Held against the rows themselves."""
    model, tokens = Attention(scale=8.0, fused=False), torch.randn(8, 16, 64)
    rows = torch.softmax(
        (model.q(tokens) @ model.k(tokens).transpose(-1, -2) * 8.0).masked_fill(
            torch.ones(16, 16).triu(1).bool(), -math.inf
        ),
        -1,
    )
    seen = rows.double().square().sum(-1).mean().item()
    (violation,) = objections(inspect(model, tokens, settings={"max_one_hot": 0.5}))
    assert violation.value == pytest.approx(seen, rel=1e-6)


def test_sharp_attention_with_small_scores_is_healthy(batch, inspect):
    """A router that has learnt to be sure, on scores that can still change, is no fault."""

    class Router(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.out = nn.Linear(16, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.out(torch.softmax(6.0 * F.one_hot(self.gate(x).argmax(1), 4), 1))

    report = inspect(Router(), batch)
    assert report["softmax"].activations.norm ** 2 / 64 > 0.95
    assert not found(report)


def test_single_choice_is_no_saturation(inspect):
    """Over one token attention is one-hot whatever it computes."""
    report = Inspector(Attention(scale=8.0, fused=True)).run_inspection(torch.randn(8, 1, 64))
    assert "saturation" not in {v.check for v in report.violations}


def test_choice_between_two_is_no_saturation(batch, inspect):
    """A switch with two positions is one-hot by design, however large its scores."""

    class Switch(nn.Module):
        def __init__(self, choices):
            super().__init__()
            self.gate, self.out = nn.Linear(16, choices), nn.Linear(choices, 4)

        def forward(self, x):
            return self.out(torch.softmax(1e4 * self.gate(x), 1))

    assert not found(inspect(Switch(2), batch))
    assert found(inspect(Switch(8), batch)) == {"softmax"}
