"""Outputs whose samples are next to equal, and whether training parts them."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_modelhealth.checks.alike_outputs import alike_outputs
from pytest_modelhealth.checks.collapse import Collapse
from pytest_modelhealth.checks.shelf import default_settings
from pytest_modelhealth.report import Healing


class Through(nn.Module):
    """Three layers, with a function between the second and the third."""

    def __init__(self, function, outputs=4):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 32)
        self.head, self.function = nn.Linear(32, outputs), function

    def forward(self, x):
        return self.head(self.function(self.second(torch.tanh(self.first(x)))))


def fading(x):
    """Leaves little of a signal."""
    return x * 1e-4


@pytest.fixture
def report(inspect):
    """Return the report of a model that classifies."""

    def run(function=fading, samples=64, change=lambda model: None):
        model, target = Through(function), torch.randint(4, (samples,))
        change(model)
        return inspect(model, torch.randn(samples, 16), target, loss=F.cross_entropy)

    return run


def judged(report, healing):
    """What the check finds when it is known whether training helps."""
    observation = replace(report.observation, healing=healing)
    return list(Collapse().run(observation, default_settings()))


def test_vanished_signal_is_found_with_its_place(report):
    """The first layer past which nothing spreads, the last before it, and what lies between."""
    found = alike_outputs(report().observation, default_settings())
    assert found is not None
    assert 1e-5 < found.deviation < found.limit.value == 5e-4
    assert found.culprit.name == "head"
    assert "the signal of 'second' is lost" in found.cause
    assert "mul" in found.cause


def test_healthy_signal_is_not(report):
    """A model at its start."""
    made = report(torch.relu)
    assert alike_outputs(made.observation, default_settings()) is None
    assert made.healthy


def test_without_steps_it_is_inconclusive(report):
    """Branches that start near zero look the same."""
    made = report()
    assert made.violations == ()
    (found,) = made.inconclusive
    assert (found.check, found.layer) == ("collapse", "head")
    assert "was not tried" in found.reason


@pytest.mark.parametrize("last", [1e-4, 2.9e-4, 1e-6])
def test_what_steps_do_not_heal_is_a_violation(last, report):
    """It is still under the limit, and less than three times the first."""
    (found,) = judged(report(), Healing(1e-4, last, 3))
    assert found.layer == "head"
    assert f"by {last:.2g} after 3 training steps" in found.message
    assert found.limit == 5e-4


@pytest.mark.parametrize("last", [3.1e-4, 1e-3], ids=["three times", "over the limit"])
def test_what_heals_is_no_finding(last, report):
    """LayerScale opens with its first steps."""
    assert judged(report(), Healing(1e-4, last, 3)) == []


def test_trained_model_is_inconclusive_whatever_the_steps_say(report):
    """A codebook may have collapsed in training, or its outputs be alike on purpose."""

    def train(model):
        with torch.no_grad():
            model.first.bias += 1.0

    (found,) = judged(report(change=train), Healing(1e-4, 1e-4, 3))
    assert "trained models" in found.reason


def test_fresh_batch_norm_is_judged(report):
    """It counts the batch of this very run."""

    def normalise(model):
        model.first = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32))

    (found,) = judged(report(change=normalise), Healing(1e-4, 1e-4, 3))
    assert found.limit == 5e-4


def test_few_samples_are_not_judged(report):
    """As of equal outputs."""
    assert report(samples=4).inconclusive == ()


def test_samples_that_are_equal_in_the_batch_are_not_judged(inspect):
    """What goes in equal comes out equal."""
    batch = torch.randn(1, 16).expand(64, 16)
    made = inspect(Through(lambda x: x + 1e-5 * torch.randn_like(x)), batch)
    assert made[""].sample_deviation < 5e-4
    assert alike_outputs(made.observation, default_settings()) is None


@pytest.mark.parametrize("outputs", [1, 4])
def test_targets_far_from_zero_are_no_collapse(outputs, inspect):
    """Years, alone or in a column beside months."""
    offset = torch.tensor([2000.0, 6.0, 0.0, 15.0])[:outputs] * 1e3
    model = Through(torch.relu, outputs)
    with torch.no_grad():
        model.head.bias.copy_(offset)
    batch, target = torch.randn(64, 16), torch.randn(64, outputs) + offset
    made = inspect(model, batch, target, loss=F.mse_loss)
    assert alike_outputs(made.observation, default_settings()) is None
    if outputs > 1:  # the same outputs for other targets are alike
        other = inspect(model, batch, target - offset, loss=F.mse_loss)
        assert alike_outputs(other.observation, default_settings()) is not None


def test_limit_is_a_setting(inspect):
    """Whoever means it says so."""
    settings = {"settings": {"min_sample_deviation": 1e-5}}
    assert inspect(Through(fading), torch.randn(64, 16), **settings).healthy


def test_model_is_named_where_positions_hide_the_place(inspect):
    """Units that differ from place to place spread, though samples do not."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
            self.positions = nn.Parameter(torch.randn(10, 16))

        def forward(self, x):
            return self.head(1e-5 * self.stem(x) + self.positions)

    (found,) = inspect(Positions(), torch.randn(64, 10, 8)).inconclusive
    assert found.layer == ""
