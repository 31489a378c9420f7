"""The `normalization` check: running statistics, scales, epsilons and modes."""

import copy
import math

import pytest
import torch
from torch import nn

from tests.checks.rows import Net, hold, holding, says


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


def dead_channel(model):
    """Make a channel constant, as its output is."""
    with torch.no_grad():
        model[3].weight[0] = model[4].running_var[0] = 0.0
        model[4].running_mean[0] = model[3].bias[0]
    return model


def frozen(model, scale, **values):
    """Replace a batch norm by one whose tensors are all buffers, as detectors have them."""

    def forward(m, x):
        factor = m.weight * (m.running_var + 1e-5).rsqrt()
        return x * factor + m.bias - m.running_mean * factor

    tensors = {n: v.clone() for n, v in model[4].state_dict().items() if "num" not in n}
    tensors["weight"] *= scale
    tensors["bias"] *= scale
    model[4] = holding(Net(forward, **tensors), **values).eval()
    return model


def modes(model, *modes, rate=0.5):
    """Return it with a dropout and a head, in evaluation mode but for these parts, in turn."""
    model = nn.Sequential(model, nn.Dropout(rate), nn.Linear(4, 2)).eval()
    for name in modes:
        part = model.get_submodule(name)
        part.train(not part.training)
    return model


CASES = {
    "one sample": (lambda m, x: (m, x[:1]), {}),
    "two samples": (lambda m, x: (m, x[:2]), {}),
    "64 samples": (lambda m, _: m, {}),
    "statistics that were never updated": (
        lambda m, _: m[4].reset_running_stats() or m, {"4": "fail"}, "never updated",
    ),
    # a variance is positive; a single zero is a dead channel, all of them are a fault
    "a negative variance": (
        lambda m, _: holding(m, **{"4.running_var": -1.0}), {"4": "fail"},
        "is negative", "running_var",
    ),
    "a variance of zero": (
        lambda m, _: holding(m, **{"4.running_var": 0.0}), {"4": "fail"},
        "is zero in every channel", "running_var",
    ),
    "a dead channel": (lambda m, _: dead_channel(m), {}),
    # in a model in evaluation mode; the other way round is a frozen normalisation
    "a normalisation that trains": (lambda m, _: modes(m, "0.1"), {"0.1": "fail"}),
    "a dropout that trains, too": (
        lambda m, _: modes(m, "0.1", "1"), {"0.1": "fail", "1": "fail"},
    ),
    "a frozen normalisation": (lambda m, _: modes(m, "", "0.1"), {}),
    "a dropout that drops nothing": (lambda m, _: modes(m, "1", rate=0.0), {}),
    # what the scale and shift of a frozen norm do is no fault of its statistics
    "buffers of zero": (lambda m, _: frozen(m, 0.0), {}),
    "small buffers": (lambda m, _: frozen(m, 0.01), {}),
    "buffers of zero, no variance": (lambda m, _: frozen(m, 0.0, running_var=1e-6), {}),
    "small buffers, no variance": (
        lambda m, _: frozen(m, 0.01, running_var=1e-6), {"4": "fail"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", CASES.values(), ids=CASES)
def test_trained_model(row, trained):
    """What was done to its running statistics, its modes and its scales."""
    build, *expected = row
    hold("normalization", lambda batch: build(trained, batch), *expected)


def counted(batches, momentum=0.0):
    """Return a normalisation that counted these batches and did not move."""
    norm = holding(nn.BatchNorm1d(16, momentum=momentum), num_batches_tracked=batches)
    return nn.Sequential(norm, nn.Linear(16, 4)).eval()


def few(batch):
    """Return a normalisation that saw three batches."""
    model = nn.Sequential(nn.BatchNorm1d(16), nn.Linear(16, 4))
    for _ in range(3):
        model(batch)
    return model.eval(), batch


def fresh(**values):
    """Return a normalisation that saw nothing."""
    norm = holding(nn.BatchNorm1d(8), **values)
    return nn.Sequential(nn.Linear(16, 8), norm, nn.ReLU(), nn.Linear(8, 4)).eval()


def layer_norm(width, eps=1e-5):
    """Return a network with a layer normalisation."""
    return nn.Sequential(nn.Linear(16, width), nn.LayerNorm(width, eps=eps), nn.Linear(width, 4))


def groups(number, size):
    """Return a network with a group normalisation, and images."""
    norm = nn.GroupNorm(number, 8)
    nn.init.normal_(norm.bias)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 4 if size == 1 else 1), norm, nn.SiLU(), nn.Flatten(),
        nn.Linear(8 * size**2, 4),
    )  # fmt: skip
    return model, torch.randn(32, 3, 4, 4)


def residual(norm, past):
    """Return a branch of two normalisations, of which one starts at zero, and what goes past it."""
    layers = {"norm1": nn.BatchNorm1d(16), "norm2": nn.BatchNorm1d(16)}
    holding(layers[norm], weight=0.0)
    return Net(
        lambda m, x: m.head(past(x, m) + m.norm2(m.b(torch.tanh(m.norm1(m.a(x)))))), a=(16, 16),
        b=(16, 16), head=(16, 4), zeros=torch.zeros(16), **layers,
    )  # fmt: skip


FRESH = {
    "a dropout of everything": (
        lambda _: nn.Sequential(nn.Linear(16, 32), nn.Dropout(1.0), nn.Linear(32, 4)),
        {"1": "fail"}, "its rate is 1",
    ),
    "a fresh model": (lambda x: (fresh(), 100 * x), {}),
    # statistics that are as they began after 80 batches never moved, whatever the weights say
    "a momentum of zero": (
        lambda x: (counted(80), 300.0 + 40.0 * x), {"0": "fail"},
        "momentum was zero for the 80 batches",
    ),
    "a momentum of zero, fresh": (lambda x: (counted(0), 300.0 + 40.0 * x), {}),
    # after three batches the running mean is still three quarters of its start
    "three batches": (lambda x: few(1000 + x), {"0": "unsure"}, "3 batches"),
    # a checkpoint without the count of batches is judged by its statistics
    "statistics that no batch made": (
        lambda _: fresh(running_mean=50.0), {"1": "fail"}, "far from the batch",
    ),
    # an eps of 10 beside a variance of 0.4 flattens; 1e-3 is what MobileNets use
    "an eps of MobileNets": (lambda _: layer_norm(32, eps=1e-3), {}),
    "a large eps": (lambda _: layer_norm(32, eps=10.0), {"1": "fail"}),
    # each value is its own mean; two channels, or more pixels, are not
    "a single value": (lambda _: layer_norm(1), {"1": "fail"}),
    "a group of one value": (lambda _: groups(8, 1), {"1": "fail"}),
    "a group of two": (lambda _: groups(4, 1), {}),
    "a group of pixels": (lambda _: groups(8, 4), {}),
    # the last normalisation of a branch may start at zero, if values go past it: no constant
    **{
        f"a scale of zero, {name}": (
            lambda _, norm=norm, past=past: residual(norm, past), {norm: "fail"} if fails else {},
        )
        for name, norm, past, fails in (
            ("inside", "norm1", lambda x, _: x, True),
            ("past it the input", "norm2", lambda x, _: x, False),
            ("detached", "norm2", lambda x, _: x.detach(), False),
            ("0", "norm2", lambda *_: 0, True),
            ("ones", "norm2", lambda *_: torch.ones(16), True),
            ("zeros", "norm2", lambda x, _: torch.zeros_like(x), True),
            ("times zero", "norm2", lambda x, m: 0 * m.a(x), True),
            ("a buffer", "norm2", lambda _, m: m.zeros, True),
            ("noise", "norm2", lambda x, _: torch.randn_like(x), False),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("row", FRESH.values(), ids=FRESH)
def test_fresh_model(row):
    """What a model starts with."""
    hold("normalization", *row)


@pytest.mark.parametrize(
    "spoilt",
    [
        {"running_mean": lambda mean: mean.add_(30.0)},
        {"running_var": lambda var: var.mul_(1e4)},
        {"running_var": lambda var: var.mul_(1e-4)},
    ],
    ids=["mean", "variance too large", "variance too small"],
)
def test_running_statistics_far_from_the_batch(spoilt, trained, batch, inspect):
    """The value is the root mean square of the output over that of scale and shift."""
    holding(trained[1], **spoilt)
    violation = says(inspect(trained, batch), "normalization")[0]
    assert violation.layer == "1"
    assert "running statistics" in violation.cause
    with torch.no_grad():
        out = trained[:2](batch).double()
        scale, shift = (p.double().square().mean().sqrt().item() for p in trained[1].parameters())
    expected = math.hypot(scale, shift)
    assert violation.value == pytest.approx(out.square().mean().sqrt().item() / expected, rel=1e-5)


def test_fresh_normalization_in_evaluation_mode(inspect):
    """Before any training it normalises nothing, by design."""
    report = inspect(fresh(), 20.0 * torch.randn(64, 16))
    assert report["1"].activations.rms > 5.0
    assert says(report, "normalization") == []
