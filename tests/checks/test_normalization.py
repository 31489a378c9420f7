"""The `normalization` check: running statistics, scales, epsilons and modes."""

import copy
import math

import pytest
import torch
from torch import nn


@pytest.fixture(scope="module")
def trained_once():
    """A network with batch normalisations that saw its data, in evaluation mode."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.BatchNorm1d(32),
        nn.ReLU(), nn.Linear(32, 4),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        model(torch.randn(32, 16)).square().mean().backward()
        optimizer.step()
    return model.eval()


@pytest.fixture
def trained(trained_once):
    """Its copy, to be spoilt."""
    return copy.deepcopy(trained_once)


def found(report):
    """The layers that the check names."""
    return [v.layer for v in report.violations if v.check == "normalization"]


def first(report):
    """The first violation of the check."""
    return next(v for v in report.violations if v.check == "normalization")


@pytest.mark.parametrize("samples", [1, 2, 64])
def test_running_statistics_that_fit_are_healthy(samples, trained, batch, inspect):
    """From one sample up."""
    assert found(inspect(trained, batch[:samples])) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda norm: norm.running_mean.add_(30.0),
        lambda norm: norm.running_var.mul_(1e4),
        lambda norm: norm.running_var.mul_(1e-4),
    ],
    ids=["mean", "variance too large", "variance too small"],
)
def test_running_statistics_far_from_the_batch(spoil, trained, batch, inspect):
    """The value is the root mean square of the output over that of scale and shift."""
    spoil(trained[1])
    report = inspect(trained, batch)
    violation = first(report)
    assert violation.layer == "1"
    assert "running statistics" in violation.cause
    with torch.no_grad():
        out = trained[:2](batch).double()
        scale, shift = (p.double().square().mean().sqrt().item() for p in trained[1].parameters())
    expected = math.hypot(scale, shift)
    assert violation.value == pytest.approx(out.square().mean().sqrt().item() / expected, rel=1e-5)


def test_statistics_that_were_never_updated(trained, batch, inspect):
    """A trained model whose buffers are as they started; one that is fresh is healthy."""
    trained[4].reset_running_stats()
    report = inspect(trained, batch)
    assert found(report) == ["4"]
    assert "never updated" in first(report).cause
    fresh = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 4)).eval()
    assert found(inspect(fresh, 100 * batch)) == []


def test_momentum_of_zero(batch, inspect):
    """Statistics that are as they began after 80 batches never moved, whatever the weights say."""
    model = nn.Sequential(nn.BatchNorm1d(16, momentum=0.0), nn.Linear(16, 4))
    given = 300.0 + 40.0 * batch
    assert found(inspect(model.eval(), given)) == []
    model[0].num_batches_tracked.fill_(80)
    report = inspect(model, given)
    assert found(report) == ["0"]
    assert "momentum was zero for the 80 batches" in first(report).cause


def test_statistics_of_a_few_batches_are_inconclusive(batch, inspect):
    """After three batches the running mean is still three quarters of its start."""
    model = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 4))
    for _ in range(3):
        model(1000 + batch)
    report = inspect(model.eval(), 1000 + batch)
    assert found(report) == []
    (finding,) = [i for i in report._judgement.inconclusive if i.check == "normalization"]
    assert "3 batches" in finding.reason


@pytest.mark.parametrize(("value", "word"), [(-1.0, "negative"), (0.0, "zero")])
def test_running_variance_that_is_none(value, word, trained, batch, inspect):
    """A variance is positive; a single zero is a dead channel, all of them are a fault."""
    trained[4].running_var.fill_(value)
    violation = next(
        v
        for root in inspect(trained, batch).violations
        for v in (root, *root.folded)
        if v.check == "normalization"
    )
    assert (violation.layer, violation.tensor) == ("4", "running_var")
    assert word in violation.message


def test_one_channel_without_variance_is_a_dead_channel(trained, batch, inspect):
    """Its input is constant, and so is its output."""
    with torch.no_grad():
        trained[3].weight[0] = 0.0
        trained[4].running_var[0] = 0.0
        trained[4].running_mean[0] = trained[3].bias[0]
    assert found(inspect(trained, batch)) == []


def test_normalisation_and_dropout_left_in_training_mode(trained, batch, inspect):
    """In a model in evaluation mode; the other way round is a frozen normalisation."""
    model = nn.Sequential(trained, nn.Dropout(0.5), nn.Linear(4, 2)).eval()
    model[0][1].train()
    assert found(inspect(model, batch)) == ["0.1"]
    model[1].train()
    assert found(inspect(model, batch)) == ["0.1", "1"]
    model.train()
    model[0][1].eval()
    assert found(inspect(model, batch)) == []


def test_dropout_that_drops_nothing_may_train(trained, batch, inspect):
    """A rate of zero changes nothing in either mode."""
    model = nn.Sequential(trained, nn.Dropout(0.0)).eval()
    model[1].train()
    assert found(inspect(model, batch)) == []


@pytest.mark.parametrize(("eps", "names"), [(1e-3, []), (10.0, ["1"])])
def test_large_eps(eps, names, batch, inspect):
    """An eps of 10 beside a variance of 0.4 flattens; 1e-3 is what MobileNets use."""
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32, eps=eps), nn.Linear(32, 4))
    assert found(inspect(model, batch)) == names


class Residual(nn.Module):
    """A branch of two normalisations."""

    def __init__(self, past=lambda x, _: x):
        super().__init__()
        self.a, self.norm1 = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.b, self.norm2 = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.head, self.past = nn.Linear(16, 4), past
        self.register_buffer("zeros", torch.zeros(16))

    def forward(self, x):
        y = self.norm2(self.b(torch.tanh(self.norm1(self.a(x)))))
        return self.head(self.past(x, self) + y)


@pytest.mark.parametrize(
    ("norm", "past", "names"),
    [
        ("norm1", lambda x, _: x, ["norm1"]),
        ("norm2", lambda x, _: x, []),
        ("norm2", lambda x, _: x.detach(), []),
        ("norm2", lambda *_: 0, ["norm2"]),
        ("norm2", lambda *_: torch.ones(16), ["norm2"]),
        ("norm2", lambda x, _: torch.zeros_like(x), ["norm2"]),
        ("norm2", lambda x, m: 0 * m.a(x), ["norm2"]),
        ("norm2", lambda _, m: m.zeros, ["norm2"]),
        ("norm2", lambda x, _: torch.randn_like(x), []),
    ],
    ids=["inside", "input", "detached", "0", "ones", "zeros", "times zero", "buffer", "noise"],
)
def test_zero_scale(norm, past, names, batch, inspect):
    """The last normalisation of a branch may start at zero, if values go past it: no constant."""
    model = Residual(past)
    nn.init.zeros_(model.get_submodule(norm).weight)
    assert found(inspect(model, batch)) == names


def test_normalisation_over_a_single_value(batch, inspect):
    """Each value is its own mean."""
    model = nn.Sequential(nn.Linear(16, 1), nn.LayerNorm(1), nn.Linear(1, 4))
    assert found(inspect(model, batch)) == ["1"]


@pytest.mark.parametrize(("groups", "size", "names"), [(8, 1, ["1"]), (4, 1, []), (8, 4, [])])
def test_group_of_one_value(groups, size, names, inspect):
    """A channel of one pixel is its own mean; two channels, or more pixels, are not."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 4 if size == 1 else 1), nn.GroupNorm(groups, 8), nn.SiLU(), nn.Flatten(),
        nn.Linear(8 * size**2, 4),
    )  # fmt: skip
    nn.init.normal_(model[1].bias)
    assert found(inspect(model, torch.randn(32, 3, 4, 4))) == names


class FrozenNorm(nn.Module):
    """As detectors have them: a batch norm all of whose tensors are buffers."""

    def __init__(self, norm: nn.BatchNorm1d) -> None:
        super().__init__()
        for name, value in norm.state_dict().items():
            if name != "num_batches_tracked":
                self.register_buffer(name, value.clone())

    def forward(self, x):
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        return x * scale + self.bias - self.running_mean * scale


@pytest.mark.parametrize("scale", [0.0, 0.01])
def test_scale_and_shift_of_a_frozen_norm(scale, trained, batch, inspect):
    """They are buffers: what they make of the output is no fault of the running statistics."""
    trained[4] = FrozenNorm(trained[4]).eval()
    trained[4].weight.mul_(scale)
    trained[4].bias.mul_(scale)
    assert found(inspect(trained, batch)) == []
    trained[4].running_var.fill_(1e-6)
    assert found(inspect(trained, batch)) == (["4"] if scale else [])


def test_statistics_that_no_batch_made(inspect):
    """A checkpoint without the count of batches is judged by its statistics."""
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).eval()
    model[1].running_mean.fill_(50.0)
    violation = inspect(model, torch.randn(64, 16)).violations[0]
    assert (violation.check, violation.layer) == ("normalization", "1")
    assert "far from the batch" in violation.cause


def test_fresh_normalization_in_evaluation_mode(inspect):
    """Before any training it normalises nothing, by design."""
    model = nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).eval()
    report = inspect(model, 20.0 * torch.randn(64, 16))
    assert report["1"].activations.rms > 5.0
    assert not [v for v in report.violations if v.check == "normalization"]
