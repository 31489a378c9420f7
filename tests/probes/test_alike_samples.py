"""Outputs whose samples are next to equal, and whether training parts them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_modelhealth import Inspector
from pytest_modelhealth.probes.intervening.alike import alike_outputs
from pytest_modelhealth.report import Outcome
from pytest_modelhealth.training import default_settings
from tests.capture.oracle import fingerprint


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


def inspect(model, batch, target=None, *, loss=None, settings=()):
    """Inspect under settings of its own."""
    return Inspector(model, **dict(settings)).run_inspection(batch, target, loss=loss)


@pytest.fixture
def report():
    """Return the report of a model that classifies."""

    def run(function=fading, samples=64, change=lambda model: None, **settings):
        model, target = Through(function), torch.randint(4, (samples,))
        change(model)
        batch = torch.randn(samples, 16)
        before = fingerprint(model, batch)
        made = inspect(model, batch, target, loss=F.cross_entropy, settings=settings)
        assert fingerprint(model, batch) == before
        return made

    return run


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


def test_what_three_steps_do_not_heal_is_a_violation(report):
    """By itself, without a word: the run called for it; and the model is as it was."""
    made = report()
    record = made.observation.probes["alike_samples"]
    assert (record.outcome, record.forwards, record.backwards) == (Outcome.JUDGED, 4, 3)
    (found,) = made.violations
    assert (found.check, found.layer, found.limit) == ("alike_samples", "head", 5e-4)
    assert "after 3 training steps" in found.message


def test_what_heals_is_no_finding():
    """A branch that starts near zero (LayerScale) opens with its first steps."""

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.scale = nn.Linear(16, 32), nn.Parameter(torch.full((32,), 1e-5))
            self.head = nn.Linear(32, 4)

        def forward(self, x):
            return self.head(self.scale * self.stem(x))

    made = inspect(Scaled(), torch.randn(64, 16), torch.randint(4, (64,)), loss=F.cross_entropy)
    assert made.observation.sample_deviation < 5e-4
    assert made.healthy
    (note,) = made.observation.probes["alike_samples"].notes
    assert "part the samples" in note


def test_without_the_steps_nothing_is_said(report):
    """Branches that start near zero look the same; probes=False runs nothing more."""
    made = report(probes=False)
    assert made.observation.probes.records == ()
    assert made.healthy


def test_a_trained_model_is_not_judged(report):
    """A codebook may have collapsed in training, or its outputs be alike on purpose."""

    def train(model):
        with torch.no_grad():
            model.first.bias += 1.0

    assert report(change=train).observation.probes.records == ()


def test_a_fresh_batch_norm_is_judged(report):
    """It counts the batch of this very run."""

    def normalise(model):
        model.first = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32))

    assert [one.check for one in report(change=normalise).violations] == ["alike_samples"]


def test_a_healthy_model_pays_nothing(report):
    """No probe runs by itself where nothing calls for one."""
    assert report(torch.relu).observation.probes.records == ()


def test_few_samples_are_not_judged(report):
    """As of equal outputs."""
    assert report(samples=4).inconclusive == ()


def test_samples_that_are_equal_in_the_batch_are_not_judged():
    """What goes in equal comes out equal."""
    batch = torch.randn(1, 16).expand(64, 16)
    made = inspect(Through(lambda x: x + 1e-5 * torch.randn_like(x)), batch)
    assert made.observation.sample_deviation < 5e-4
    assert alike_outputs(made.observation, default_settings()) is None


@pytest.mark.parametrize("outputs", [1, 4])
def test_targets_far_from_zero_are_no_collapse(outputs):
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


def test_limit_is_a_setting():
    """Whoever means it says so."""
    settings = {"min_sample_deviation": 1e-5}
    assert inspect(Through(fading), torch.randn(64, 16), settings=settings).healthy


def test_model_is_named_where_positions_hide_the_place():
    """Units that differ from place to place spread, though samples do not."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
            self.positions = nn.Parameter(torch.randn(10, 16))

        def forward(self, x):
            return self.head(1e-5 * self.stem(x) + self.positions)

    (found,) = inspect(Positions(), torch.randn(64, 10, 8)).violations
    assert found.layer == ""
