"""The `collapse` check: samples that become one, and units that are one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from corpus.checks.parts import Applies, Mlp
from corpus.models.hooked import make
from tests.capture.architectures import ARCHITECTURES
from tests.checks.rows import Net, hold, holding, says

ALONE = {"checks": ["collapse"]}


def around(function):
    """Return a model with such a layer in the middle."""
    return nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), Applies(function), nn.Linear(32, 32), nn.Linear(32, 4)
    )


def constant(x):
    """Return one value for all samples."""
    return x * 0 + 0.5


def mean(x):
    """Return the mean over the batch for all samples."""
    return x.mean(0, keepdim=True).expand_as(x).contiguous()


def alike(weight):
    """Give all units the weights of the first."""
    weight.copy_(weight[:1].expand_as(weight))


def small(**values):
    """Return a small network whose first layer holds these."""
    return nn.Sequential(holding(nn.Linear(16, 32), **values), nn.Tanh(), nn.Linear(32, 4))


def convolutions(**values):
    """Return two convolutions, the first of which holds these, and images."""
    first = holding(nn.Conv2d(3, 8, 3), **values)
    model = nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    return model, torch.randn(16, 3, 8, 8)


def deep(depth, dtype=torch.float32):
    """Return a deep plain network."""
    layers = [m for _ in range(depth) for m in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 4)).to(dtype), torch.rand(64, 64, dtype=dtype)


def pooled(join):
    """Return a model whose scale of zero is followed by `join`."""
    model = Net(
        lambda m, x: m.head(join(m, x, m.norm(m.fc(x)))),
        fc=(8, 8), norm=holding(nn.LayerNorm(8), weight=0.0), head=(8, 4),
        latents=nn.Parameter(torch.randn(5, 8)),
    )  # fmt: skip
    return model, torch.randn(64, 5, 8)


def modulated(start):
    """Return features times a condition that starts at a scale."""
    return Net(
        lambda m, x: m.head(torch.tanh(m.features(x)) * m.condition(x)),
        condition=holding(nn.Linear(16, 32), weight=lambda w: w.mul_(start), bias=0.0),
        features=(16, 32),
        head=(32, 4),
    )


def policy(function):
    """Return a policy and what a function makes of what it predicts."""
    return Net(lambda m, x: function(m.policy(x)), policy=(16, 1))


# a case, the model and its batch, what is said of which layer, words of it
CASES = {
    "the first sample": (
        lambda _: around(lambda x: x[:1].expand_as(x).contiguous()),
        {"2": "fail"},
        "its output is the same for all 64 samples",
    ),
    "the mean over the batch": (
        lambda _: around(mean), {"2": "fail"}, "its output is the same for all 64 samples",
    ),
    "a constant": (
        lambda _: around(constant), {"2": "fail"}, "its output is the same for all 64 samples",
    ),
    "equal samples in the batch": (lambda x: (Mlp(), x[:1].expand(64, 16)), {}),
    "few samples": (lambda x: (around(constant), x[:4]), {"2": "unsure"}),
    "the forward of a container": (
        lambda _: nn.Sequential(
            nn.Linear(16, 16),
            Net(lambda m, x: m.b(mean(m.a(x))), a=(16, 8), b=(8, 8)),
            nn.Linear(8, 4),
        ),
        {"1": "fail"},
        "between its submodules",
    ),
    # what starts at zero may do so at the end, or where the samples go past it
    "zero scale": (
        lambda _: pooled(lambda m, x, y: F.silu(y).mean(1)),
        {"norm": "fail"},
        "start or ended at zero",
    ),
    "zero scale and a number": (
        lambda _: pooled(lambda m, x, y: F.silu(2.0 * y + 0).mean(1)),
        {"norm": "fail"},
        "start or ended at zero",
    ),
    "zero scale and latents": (
        lambda _: pooled(lambda m, x, y: F.silu(y + m.latents).mean(1)),
        {"norm": "warn"},
        "start or ended at zero",
    ),
    "zero scale and a residual": (lambda _: pooled(lambda m, x, y: F.silu(x + y).mean(1)), {}),
    "a condition of zero": (lambda _: modulated(0.0), {"": "fail"}),
    "a condition": (lambda _: modulated(1.0), {}),
    # random values in a row, yet the same row for every unit
    "equal units": (lambda _: holding(Mlp(), **{"fc1.weight": alike}), {"fc1": "fail"}),
    "equal units inside": (lambda _: holding(Mlp(), **{"fc2.weight": alike}), {"fc2": "fail"}),
    "equal channels": (lambda _: convolutions(weight=alike), {"0": "fail"}),
    "channels": (lambda _: convolutions(), {}),
    "5 layers": (lambda _: deep(5), {}),
    "20 layers": (lambda _: deep(20), {}),
    "5 layers in bfloat16": (lambda _: deep(5, torch.bfloat16), {}),
    # only what passes no other way than the one without gradient is equal on purpose
    "a value from itself, with its gradient": (lambda _: policy(lambda p: p - p), {"": "fail"}),
    "a value from itself, with another way": (
        lambda _: policy(lambda p: (p - p.detach()) + 0.0 * p), {"": "fail"},
    ),
    "the mean of a value": (
        lambda _: policy(lambda p: torch.full_like(p, p.mean().item())), {"": "fail"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", CASES.values(), ids=CASES)
def test_what_is_said_of(row):
    """The layers after the one that is named are its consequences."""
    hold("collapse", *row)


def ratio(old):
    """Return the ratio of a policy and the old one, which `old` makes of what it is given."""

    def forward(m, x):
        new = torch.relu(m.policy(x)).squeeze(-1)
        with torch.no_grad():
            before = old(m, x, new)
        quotient = (new - before).exp()
        return {"loss": (quotient * x[:, 0]).mean(), "ratio": quotient}

    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    return Net(forward, policy=model, second=(1, 1))


@pytest.mark.parametrize(
    "build",
    [
        lambda _: holding(Mlp(), **{"head.weight": 0.0, "head.bias": 0.0}),
        lambda _: ratio(lambda m, x, new: new.detach()),
        lambda _: ratio(lambda m, x, new: torch.relu(m.policy(x)).squeeze(-1)),
    ],
    ids=["a head of zeros", "a value beside itself", "a second forward"],
)
def test_outputs_that_are_equal_on_purpose(build):
    """Until the first step, or with a gradient that is what is wanted."""
    assert hold("collapse", build, {})[""].equal_samples


@pytest.mark.parametrize(("depth", "is_unsure"), [(20, False), (40, True)])
def test_samples_that_rounding_makes_equal_are_inconclusive(depth, is_unsure, inspect):
    """Forty layers bring them so close that bfloat16 tells them apart no more."""
    report = inspect(*deep(depth, torch.bfloat16))
    severities = [f.grade for f in says(report, "collapse")]
    assert severities in ([["unsure"]] if is_unsure else [[], ["unsure"]])
    assert report[""].equal_samples or not is_unsure


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "t5", "sam"])
def test_positions_and_class_tokens_are_equal_for_all_samples(name):
    """They are features of the model, and the output differs all the same."""
    few = {"mask_decoder": "unsure"} if name == "sam" else {}
    hold("collapse", lambda _: make(ARCHITECTURES[name]), few)


@pytest.mark.parametrize("most", [3, 5, 8])
def test_flow_that_ends_before_the_output_breaks_nothing(most, monkeypatch):
    """Of a run of too many operations the rest was not followed; who did it is still named."""
    monkeypatch.setattr("pytest_modelhealth.capture.observing.flow.rows.MOST_VERTICES", most)
    report = hold("collapse", lambda _: around(constant), {"2": "fail"}, **ALONE)
    assert not report.flow.is_exact
