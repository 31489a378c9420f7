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


def two_ways(factor, **values):
    """Return a model of which one layer drops what it is given at a factor of zero."""
    dropping = holding(nn.Linear(16, 8), **values)
    forward = dropping.forward
    dropping.forward = lambda x: forward(x * factor)
    return Net(lambda m, x: m.head(torch.tanh(m.a(x)) + m.b(x)), a=dropping, b=(16, 8), head=(8, 4))


def pooled(join):
    """Return a model whose scale of zero is followed by `join`."""
    model = Net(
        lambda m, x: m.head(join(m, x, m.norm(m.fc(x)))),
        fc=(8, 8), norm=holding(nn.LayerNorm(8), weight=0.0), head=(8, 4),
        latents=nn.Parameter(torch.randn(5, 8)),
    )  # fmt: skip
    return model, torch.randn(64, 5, 8)


def far_from(x, targets):
    """Return a regression whose bias starts at a million, and targets around a number."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), holding(nn.Linear(32, 1), bias=1e6))
    return model, x, targets + torch.randn(64, 1), F.mse_loss


def waves(rest, pool):
    """Lay each feature out as a wave whose mean over the positions is `rest` of it, about one."""
    signs = torch.tensor([1.0, -1.0]).repeat(32)
    wave = Applies(lambda x: x[..., None] * (signs + rest) + 1.0)
    return nn.Sequential(nn.Linear(16, 8), wave, pool(64), nn.Flatten(), nn.Linear(8, 3))


def aside(function, forward):
    """Return a model with such a layer, and another that runs aside of the output."""
    return Net(
        lambda m, x: forward(m.aside, lambda x: m.head(m.collapses(torch.tanh(m.fc(x)))), x),
        fc=(16, 32), head=(32, 4), aside=(16, 4), collapses=Applies(function),
    )  # fmt: skip


def modulated(start):
    """Return features times a condition that starts at a scale."""
    return Net(
        lambda m, x: m.head(torch.tanh(m.features(x)) * m.condition(x)),
        condition=holding(nn.Linear(16, 32), weight=lambda w: w.mul_(start), bias=0.0),
        features=(16, 32),
        head=(32, 4),
    )


def integrated(carry):
    """Return a model that integrates six steps, of which `carry` says how they go on."""

    def forward(m, x):
        start = state = m.start(x)
        outputs = []
        for _ in range(6):
            before = start if carry == "none" else state
            state = before + 0.3 * m.derivative(before)
            outputs.append(m.observe(state))
        return outputs[-1].expand(-1, 6) if carry == "last" else torch.cat(outputs, 1)

    model = Net(forward, start=(16, 8), derivative=(8, 8), observe=(8, 1))
    return model, torch.randn(64, 16), torch.randn(64, 6), nn.MSELoss()


def bounded():
    """Return a model whose predictions end at the same numbers, and are not the same."""
    model = nn.Sequential(holding(nn.Linear(16, 6), weight=lambda w: w.mul_(4.0)), nn.Hardtanh())
    return model, torch.randn(64, 16), torch.randn(64, 6), nn.MSELoss()


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
    "drowned": (lambda _: around(lambda x: x + 1e6), {"2": "fail"}),
    "a constant that leaves enough": (lambda _: around(lambda x: x + 10.0), {}),
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
    "drops its inputs beside another": (lambda _: two_ways(0.0), {"a": "fail"}),
    "drops nothing": (lambda _: two_ways(1.0), {}),
    "drops four samples": (lambda x: (two_ways(0.0), x[:4]), {}),
    "zero weights beside another way": (lambda _: two_ways(1.0, weight=0.0), {}),
    "a bias where the targets are": (lambda x: far_from(x, 1e6), {}),
    "a bias far from the targets": (lambda x: far_from(x, 0.0), {"2": "fail"}),
    # the bias of the first layer leaves nothing of inputs of 1e-7; of 1e-3 it leaves enough
    "a batch in its unit": (lambda x: (small(), x), {}),
    "a batch in a large unit": (lambda x: (small(), 1e-3 * x), {}),
    "a batch in too large a unit": (lambda x: (small(), 1e-7 * x), {"0": "fail"}),
    "differences for a derivative": (lambda x: (small(), x[:1] + 1e-6 * torch.randn(64, 16)), {}),
    "weights that share a mean": (
        lambda _: (
            small(weight=lambda w: w.normal_(1.0, 1e-7), bias=lambda b: b.uniform_(-0.1, 0.1)),
            torch.softmax(0.01 * torch.randn(64, 16), -1),
        ),
        {},
    ),
    **{
        f"{name} and a layer aside {when}": (
            lambda _, function=function, forward=forward: aside(function, forward), layers,
        )
        for when, forward in (
            ("before", lambda aside, rest, x: (aside(x), rest(x))[1]),
            ("after", lambda aside, rest, x: (rest(x), aside(x))[0]),
        )
        for name, function, layers in (
            ("constant", constant, {"collapses": "fail"}),
            ("drowned", lambda x: x + 1e6, {"collapses": "fail"}),
            ("healthy", abs, {}),
        )
    },
    "brought back by another branch": (
        lambda _: Net(
            lambda m, x: m.head(torch.cat([m.a(x) * 1e-6, m.b(x)], 1)),
            a=around(lambda x: x + 1e6)[:3], b=(16, 32), head=(64, 4),
        ),
        {},
    ),
    # only what passes no other way than the one without gradient is equal on purpose
    "a value from itself, with its gradient": (lambda _: policy(lambda p: p - p), {"": "fail"}),
    "a value from itself, with another way": (
        lambda _: policy(lambda p: (p - p.detach()) + 0.0 * p), {"": "fail"},
    ),
    "the mean of a value": (
        lambda _: policy(lambda p: torch.full_like(p, p.mean().item())), {"": "fail"},
    ),
    "steps that begin at the start": (lambda _: integrated("none"), {"": "warn"}),
    "a last step that is repeated": (lambda _: integrated("last"), {"": "warn"}),
    "steps": (lambda _: integrated("all"), {}),
    "bounded predictions": (lambda _: bounded(), {}),
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


@pytest.mark.parametrize(
    ("rest", "pool", "layers"),
    [
        (1e-6, nn.AvgPool1d, {"2": "fail"}),
        (0.0, nn.AvgPool1d, {"2": "fail"}),
        (1.0, nn.AvgPool1d, {}),
        (1e-6, nn.MaxPool1d, {}),
    ],
)
def test_pooling_layer_is_not_said_to_add_anything(rest, pool, layers):
    """It has no parameters to add or to multiply by: what differs cancels out in it."""
    report = hold("collapse", lambda _: waves(rest, pool), layers, "cancels out")
    assert all("adds" not in v.cause for v in says(report, "collapse"))


@pytest.mark.parametrize(("depth", "is_unsure"), [(20, False), (40, True)])
def test_samples_that_rounding_makes_equal_are_inconclusive(depth, is_unsure, inspect):
    """Forty layers bring them so close that bfloat16 tells them apart no more."""
    report = inspect(*deep(depth, torch.bfloat16))
    severities = [getattr(f, "severity", "unsure") for f in says(report, "collapse")]
    assert severities in ([["unsure"]] if is_unsure else [[], ["unsure"]])
    assert report[""].equal_samples or not is_unsure


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "t5", "sam"])
def test_positions_and_class_tokens_are_equal_for_all_samples(name):
    """They are features of the model, and the output differs all the same."""
    few = {"mask_decoder": "unsure"} if name == "sam" else {}
    hold("collapse", lambda _: make(ARCHITECTURES[name]), few)


def test_dropout_alone_makes_no_spread(batch, inspect):
    """Samples that are equal but for a dropout are laid to what made them equal."""
    head = holding(nn.Linear(32, 4), bias=1e5, weight=lambda w: w.normal_(std=0.03))
    zero = Applies(lambda x: x * 0)
    model = nn.Sequential(nn.Linear(16, 32), zero, nn.Linear(32, 32), nn.Dropout(0.5), head)
    assert "4" not in [v.layer for v in inspect(model, batch, settings=ALONE).violations]


@pytest.mark.parametrize(("depth", "is_residual"), [(24, False), (16, True), (2, False)])
def test_tokens_that_attention_made_alike_are_named(depth, is_residual, inspect):
    """Without residual connections attention averages tokens until their keys are equal."""

    def forward(m, x):
        for q, k, v in m.layers:
            x = m.norm(x)
            mixed = (3 * q(x) @ k(x).mT).softmax(-1) @ v(x)
            x = x + mixed if is_residual else mixed
        return m.head(x.mean(1))

    layers = [nn.ModuleList(nn.Linear(16, 16) for _ in range(3)) for _ in range(depth)]
    model = Net(forward, layers=nn.ModuleList(layers), norm=nn.LayerNorm(16), head=(16, 4))
    tokens = torch.randn(32, 12, 16)
    report = inspect(model, tokens[:, :1].expand_as(tokens).contiguous() if depth == 2 else tokens)
    if depth == 24:
        (violation,) = [v for v in report.violations if "tokens alike" in v.message]
        assert violation.layer.startswith("softmax")
    else:
        assert says(report, "collapse") == []


@pytest.mark.parametrize("most", [3, 5, 8])
def test_flow_that_ends_before_the_output_breaks_nothing(most, monkeypatch):
    """Of a run of too many operations the rest was not followed; who did it is still named."""
    monkeypatch.setattr("pytest_modelhealth.capture.observing.flow.rows.MOST_VERTICES", most)
    report = hold("collapse", lambda _: around(constant), {"2": "fail"}, **ALONE)
    assert not report.flow.is_exact
