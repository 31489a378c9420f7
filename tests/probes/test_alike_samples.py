"""Outputs whose samples are next to equal, and whether training parts them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_modelhealth import Inspector
from pytest_modelhealth.checks import default_settings
from pytest_modelhealth.probes.intervening import alike
from pytest_modelhealth.probes.intervening.alike import are_alike
from pytest_modelhealth.report import Outcome
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


def test_what_three_steps_do_not_heal_is_a_violation(report):
    """By itself, without a word: the run called for it; and the model is as it was.

    The first layer past which nothing spreads is named, the last before it, and what lies between.
    """
    made = report()
    record = made.observation.probes["alike_samples"]
    assert (record.outcome, record.forwards, record.backwards) == (Outcome.JUDGED, 4, 3)
    (found,) = made.violations
    assert (found.check, found.layer, found.limit) == ("alike_samples", "head", 5e-4)
    assert 1e-5 < found.value < found.limit
    assert "the signal of 'second' is lost" in found.cause
    assert "mul" in found.cause
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


def train(model):
    """Move a model away from its start."""
    with torch.no_grad():
        model.first.bias += 1.0


@pytest.mark.parametrize(
    "given", [{"function": torch.relu}, {"change": train}, {"samples": 4}, {"probes": False}]
)
def test_where_it_is_not_called_for_nothing_runs(report, given):
    """Healthy models pay nothing, in a trained one it may be meant, few samples tell nothing."""
    made = report(**given)
    assert made.observation.probes.records == ()
    assert made.inconclusive == ()
    assert made.healthy


def test_a_fresh_batch_norm_is_judged(report):
    """It counts the batch of this very run."""

    def normalise(model):
        model.first = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32))

    assert [one.check for one in report(change=normalise).violations] == ["alike_samples"]


def test_samples_that_are_equal_in_the_batch_are_not_judged():
    """What goes in equal comes out equal."""
    batch = torch.randn(1, 16).expand(64, 16)
    made = inspect(Through(lambda x: x + 1e-5 * torch.randn_like(x)), batch)
    assert made.observation.sample_deviation < 5e-4
    assert not are_alike(made.observation, default_settings())


@pytest.mark.parametrize("outputs", [1, 4])
def test_targets_far_from_zero_are_no_collapse(outputs):
    """Years, alone or in a column beside months."""
    offset = torch.tensor([2000.0, 6.0, 0.0, 15.0])[:outputs] * 1e3
    model = Through(torch.relu, outputs)
    with torch.no_grad():
        model.head.bias.copy_(offset)
    batch, target = torch.randn(64, 16), torch.randn(64, outputs) + offset
    made = inspect(model, batch, target, loss=F.mse_loss)
    assert not are_alike(made.observation, default_settings())
    if outputs > 1:  # the same outputs for other targets are alike
        other = inspect(model, batch, target - offset, loss=F.mse_loss)
        assert are_alike(other.observation, default_settings())


def test_model_is_named_where_positions_hide_the_place():
    """Units that differ from place to place spread, though samples do not.

    Whoever means it says so.
    """

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
            self.positions = nn.Parameter(torch.randn(10, 16))

        def forward(self, x):
            return self.head(1e-5 * self.stem(x) + self.positions)

    batch = torch.randn(64, 10, 8)
    (found,) = inspect(Positions(), batch).violations
    assert found.layer == ""
    assert inspect(Positions(), batch, settings={"min_sample_deviation": 1e-9}).healthy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_steps_are_those_of_torchs_adam(dtype):
    """The probe's own Adam moves parameters bit for bit as `torch.optim.Adam` does."""
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.arange(7).to(dtype)) for _ in range(2))
    adam, optimizer = alike._Adam([ours]), torch.optim.Adam([theirs])
    for _ in range(3):
        ours.grad = torch.randn(7, dtype=dtype)
        theirs.grad = ours.grad.clone()
        adam.step()
        optimizer.step()
    assert torch.equal(ours, theirs)
