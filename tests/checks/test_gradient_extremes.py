"""Gradients that no optimizer moves by, and singular ones: found by the `grad_norm` check."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from corpus.checks.parts import Applies


def network(*more):
    """A small network, and what comes after it."""
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1), *more)


@pytest.fixture
def target():
    """A number from 0 to 1 for each sample."""
    return torch.rand(64, 1)


def told(report):
    """The violations and warnings of the check."""
    return [v for v in (*report.violations, *report.warnings) if v.check == "grad_norm"]


# ---- gradients that move nothing ----------------------------------------------------------------


@pytest.mark.parametrize(
    "loss",
    [lambda o, t: 1 + 1e-13 * F.mse_loss(o, t), lambda o, t: F.mse_loss(torch.sigmoid(o - 60), t)],
    ids=["a factor", "saturated"],
)
def test_loss_that_sends_nothing_back(loss, batch, target, inspect, only):
    """The loss is named where the gradient is as small at the output."""
    violation = only(inspect(network(), batch, target, loss=loss), "grad_norm")
    assert violation.layer == ""
    assert "no optimizer moves" in violation.message
    assert "the loss itself" in violation.cause
    assert 0.0 < violation.value < violation.limit == 1e-10


def test_loss_of_a_scale_at_which_nothing_moves(batch, target, inspect, only):
    """The loss itself may be as small; in a fresh model it is not learnt."""
    tiny = lambda o, t: 1e-13 * F.mse_loss(o, t)  # noqa: E731
    violation = only(inspect(network(), batch, target, loss=tiny), "grad_norm")
    assert "the loss itself" in violation.cause
    model = network()
    with torch.no_grad():
        model[0].bias += 1.0
    assert told(inspect(model, batch, target, loss=tiny)) == []


def test_layer_that_sends_nothing_back(batch, target, inspect, only):
    """The layer is named behind which the gradient is usual."""
    model = network(Applies(lambda x: x - 60), nn.Sigmoid())
    violation = only(inspect(model, batch, target, loss=F.mse_loss), "grad_norm")
    assert violation.layer == "4"
    assert "inputs in [-6" in violation.cause


def test_small_gradients_that_move(batch, target, inspect):
    """Gradients of 1e-6 are small and no fault."""
    report = inspect(network(), batch, target, loss=lambda o, t: 1 + 1e-6 * F.mse_loss(o, t))
    assert told(report) == []


def test_what_is_learnt_has_small_gradients(batch, inspect):
    """Where the loss is next to zero, so are gradients."""
    model = nn.Linear(16, 1)
    target = model(batch).detach() + 1e-6 * torch.randn(64, 1)
    assert told(inspect(model, batch, target, loss=lambda o, t: 1e-6 * F.mse_loss(o, t))) == []


def test_fits_in_double_precision_end_so(batch, target, inspect):
    """In float64 it is a warning: a fit that has converged looks the same."""
    model, x, y = network().double(), batch.double(), target.double()
    (finding,) = told(inspect(model, x, y, loss=lambda o, t: 1 + 1e-13 * F.mse_loss(o, t)))
    assert finding.grade == "warn"


# ---- singular derivatives -----------------------------------------------------------------------


def almost_zero_root(output, target):
    """A loss with a root of something next to zero."""
    return F.mse_loss(output, target) + (output - output.detach() + 1e-24).sqrt().sum()


def test_root_in_the_loss(batch, target, inspect):
    """The operation of the loss is named."""
    report = inspect(network(), batch, target, loss=almost_zero_root)
    violation = next(v for v in told(report) if v.grade == "fail")
    assert "`sqrt` at" in violation.cause
    assert violation.value > 1e8


class Rooted(nn.Module):
    """Takes the root of what is next to zero between two layers."""

    def __init__(self, epsilon):
        super().__init__()
        self.first, self.last, self.epsilon = nn.Linear(16, 32), nn.Linear(32, 1), epsilon

    def forward(self, x):
        h = self.first(x)
        moved = h - h.detach() + self.epsilon
        return self.last(h + moved.sqrt())


def test_root_between_layers(batch, target, inspect):
    """The operation between two layers is named, with the layer that gets its gradient."""
    report = inspect(Rooted(1e-24), batch, target, loss=F.mse_loss)
    violation = next(v for v in told(report) if v.grade == "fail")
    assert violation.layer == "first"
    assert "`sqrt` at" in violation.cause


def test_root_with_an_epsilon(batch, target, inspect):
    """With an epsilon that is usual nothing is said."""
    assert told(inspect(Rooted(1e-6), batch, target, loss=F.mse_loss)) == []
