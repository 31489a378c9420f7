"""The `dead_units` check: activations most of whose units never fire."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from corpus.checks.parts import Applies, Mlp
from pytest_modelhealth import Inspector, ModelHealthWarning
from tests.checks.rows import Net, hold, holding, says


def dead(layer, fraction=1.0, value=-50.0):
    """Return a layer, a share of whose units is on the flat side of the activation after it."""
    return holding(layer, bias=lambda bias: bias[: round(fraction * len(bias))].fill_(value))


def held_down():
    """Return a perceptron whose first layer is dead."""
    return holding(Mlp(), **{"fc1.bias": -50.0})


def before(activation, *, is_dead=False):
    """Return a model with an activation, a module, after a layer that may be dead."""
    first = nn.Linear(16, 32)
    return nn.Sequential(dead(first) if is_dead else first, activation, nn.Linear(32, 4))


def between(function, *, is_dead=True):
    """Return a model with an activation, a function, after a layer that may be dead."""
    first = nn.Linear(16, 32)
    return Net(
        lambda m, x: m.head(function(m.fc(x))), fc=dead(first) if is_dead else first, head=(32, 4)
    )


def deep(depth):
    """Return a deep plain network, in which samples line up."""
    layers = [m for _ in range(depth) for m in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers), torch.rand(64, 64)


def gated(gate):
    """Return two ways behind a gate, one through a ReLU; beside it a projection that is zero."""
    closed = nn.Parameter(torch.zeros(16)) if gate == "parameter" else torch.zeros(16)

    def forward(m, x):
        h, side = m.fc(x), m.side(x)
        if gate == "zeros":  # what starts at zero feeds the ReLU, and another way lets it learn
            return m.skip(side) + m.head(m.relu(side))
        h = h * (side if gate == "layer" else m.closed)
        return m.skip(h + side) + m.head(m.relu(h)), m.skip(h)

    return Net(
        forward, fc=(16, 16), side=holding(nn.Linear(16, 16), weight=0.0, bias=0.0),
        relu=nn.ReLU(), skip=(16, 4), head=(16, 4), closed=closed,
    )  # fmt: skip


def sparsemax(x):
    """Project onto the simplex."""
    ordered = x.sort(-1, descending=True).values
    sums = ordered.cumsum(-1) - 1
    kept = (torch.arange(1, x.shape[-1] + 1) * ordered > sums).sum(-1, keepdim=True)
    return (x - sums.gather(-1, kept - 1) / kept).clamp(min=0)


def chosen():
    """Return a choice of two in thirty."""
    chooser = nn.Linear(16, 30)
    chooser.bias.data[:2] += 5.0
    return nn.Sequential(chooser, Applies(sparsemax), nn.Linear(30, 4))


def hinged(margin):
    """Return scores of one unit, and what they lack to a margin."""

    def forward(m, x):
        score = m.score(torch.tanh(m.fc(x)))
        return F.relu(score if margin is None else margin - score).mean()

    bias = -10.0 if margin is None else 0.0
    score = holding(nn.Linear(32, 1), bias=bias)
    return Net(forward, fc=(16, 32), score=score)


def pixels(samples):
    """Return a dead convolution, and images."""
    model = nn.Sequential(dead(nn.Conv2d(3, 8, 1)), nn.ReLU(), nn.Conv2d(8, 2, 1))
    return model, torch.randn(samples, 3, 8, 8)


def eight(units, fraction):
    """Return a layer of which a fraction is dead, and eight samples."""
    first = dead(nn.Linear(16, units), fraction)
    return nn.Sequential(first, nn.ReLU(), nn.Linear(units, 4)), torch.randn(8, 16)


def tokens():
    """Return a dead layer, and a sequence of 64 tokens."""
    model = nn.Sequential(dead(nn.Linear(16, 8)), nn.ReLU(), nn.Linear(8, 2))
    return model, torch.randn(1, 64, 16)


DEAD, FOLDED, UNSURE = {"1": "fail"}, {"1": "folded"}, {"1": "unsure"}
CASES = {
    # the activation is the culprit; the layer that holds it down is in the cause
    "a layer": (lambda _: held_down(), {"act1": "fail"}, "'fc1'", "its bias"),
    "a PReLU": (lambda _: before(nn.PReLU(init=0.25), is_dead=True), {}),
    "a PReLU without a slope": (lambda _: before(nn.PReLU(init=0.0), is_dead=True), DEAD),
    # its rows sum to one
    "a projection onto the simplex": (lambda _: chosen(), {}),
    # two or four samples say nothing about units; of 16 units one would be active by chance in
    # eight, of 8, or where some are, that says too little
    "two samples": (lambda x: (held_down(), x[:2]), {"act1": "unsure"}, "at least 32"),
    "four samples": (lambda x: (held_down(), x[:4]), {"act1": "unsure"}, "at least 32"),
    "eight samples of 16 units": (lambda _: eight(16, 1.0), DEAD),
    "eight samples of 16 units, most dead": (lambda _: eight(16, 0.9), UNSURE),
    "eight samples of 8 units": (lambda _: eight(8, 1.0), UNSURE),
    # tokens are samples, and pixels are not
    "64 tokens": (lambda _: tokens(), DEAD),
    "one image": (lambda _: pixels(1), UNSURE),
    "32 images": (lambda _: pixels(32), DEAD),
    # a gate that starts at zero and learns opens; a buffer of zeros never does
    "a gate": (lambda _: gated("parameter"), {}),
    "a layer as a gate": (lambda _: gated("layer"), {}),
    "a buffer as a gate": (lambda _: gated("buffer"), {"relu": "fail"}),
    "a layer that starts at zero": (lambda _: gated("zeros"), {}),
    # a number below its margin is what the loss asks for; the one unit of a layer can die
    "a hinge that is satisfied": (lambda _: hinged(-10.0), {}),
    "a hinge without a margin": (lambda _: hinged(None), {"relu": "fail"}),
    **{
        f"{depth} fresh layers, seed {seed}": (
            lambda _, depth=depth, seed=seed: torch.manual_seed(seed) and deep(depth), {},
        )
        for depth in (5, 20)
        for seed in range(5)
    },
}  # fmt: skip


@pytest.mark.parametrize("row", CASES.values(), ids=CASES)
def test_what_is_said_of(row):
    """A layer that is dead, of that activation, and of nothing else."""
    report = hold("dead_units", *row)
    if "unsure" in row[1].values():
        assert report.verdict == "inconclusive"


ACTIVATIONS = {
    name: getattr(F, name)
    for name in ["relu", "gelu", "silu", "hardswish", "mish", "softplus", "elu", "selu", "celu"]
} | {"threshold": lambda x: F.threshold(x, 0.1, 0.25)}


@pytest.mark.parametrize(("name", "function"), ACTIVATIONS.items(), ids=ACTIVATIONS)
def test_every_activation_with_a_flat_side_can_die(name, function, batch, inspect, only):
    """ELU and its kin end at a negative constant, a threshold at its value, without a gradient."""
    assert inspect(between(function, is_dead=False), batch).healthy
    violation = only(inspect(between(function), batch), "dead_units")
    assert (violation.layer, violation.value) == (name, 1.0)


@pytest.mark.parametrize(
    ("activation", "is_dead"), [(Applies(lambda x: x * (x > 0)), False), (nn.LeakyReLU(), True)]
)
def test_what_is_no_dead_unit_is_healthy(activation, is_dead, batch, inspect):
    """A rectifier of the project's own that is alive, and what passes a gradient on both sides."""
    assert inspect(before(activation, is_dead=is_dead), batch).healthy


def test_dead_layer_is_named_with_its_value(batch, inspect, only):
    """And with the limit, and who set it."""
    violation = only(inspect(held_down(), batch), "dead_units")
    assert (violation.role, violation.value) == ("activations", 1.0)
    assert (violation.limit, violation.origin) == (0.8, "default")


@pytest.mark.parametrize(
    ("fraction", "limit", "healthy"), [(0.5, 0.6, True), (0.5, 0.4, False), (0.75, 0.75, True)]
)
def test_limit_is_the_largest_fraction_allowed(fraction, limit, healthy, batch, inspect):
    """A dead fraction equal to its limit passes; `value` is the true fraction."""
    first = dead(holding(nn.Linear(16, 32), bias=50.0), fraction)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(32, 4))
    report = inspect(model, batch, settings={"max_dead_fraction": limit})
    assert report["1"].activations.dead_fraction == fraction
    assert report.healthy is healthy


@pytest.mark.parametrize(
    ("clamp", "is_rectifier"),
    [
        (lambda x: x.clamp(min=0), True),
        (lambda x: torch.clamp(x, 0), True),
        (lambda x: x.clamp_min(0.0), True),
        (lambda x: torch.clip(x, min=0), True),
        (lambda x: x.clamp(min=-100), False),
        (lambda x: x.clamp(0, 1), False),
        (lambda x: x.clamp(max=0), False),
    ],
)
def test_clamp_at_zero_is_a_rectifier(clamp, is_rectifier, batch, inspect):
    """A clamp from zero on computes what relu does, and dies as it does; no other clamp is one."""
    assert ("relu" in inspect(between(clamp, is_dead=False), batch).layers) is is_rectifier
    violations = says(inspect(between(clamp), batch), "dead_units")
    assert ("relu" in [v.layer for v in violations]) is is_rectifier


@pytest.mark.parametrize(("bias", "healthy"), [(-50.0, False), (-0.2, True)])
def test_units_that_something_holds_down(bias, healthy, batch, inspect):
    """Two thirds of the units far below what the others reach are a fault; a mild shift is none."""
    first = dead(nn.Linear(16, 48), 2 / 3, bias)
    report = inspect(nn.Sequential(first, nn.ReLU(), nn.Linear(48, 4)), batch)
    assert report.healthy is healthy
    for violation in report.violations:
        assert (violation.value, violation.limit) == (pytest.approx(2 / 3), 0.5)


def test_few_samples_are_warned_of(batch, inspect):
    """A run that is inconclusive passes, and says so."""
    with pytest.warns(ModelHealthWarning, match="inconclusive: act1"):
        inspect(held_down(), batch[:4]).assert_healthy()


def test_channels_are_the_units_of_a_convolution(inspect):
    """One dead channel of four is a quarter, however many pixels it has."""
    norm = dead(nn.BatchNorm2d(4), 1 / 4)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU()).eval()
    assert inspect(model, torch.randn(32, 3, 8, 8))["2"].activations.dead_fraction == 0.25


def test_dead_in_one_batch_but_not_in_another_is_alive(batch):
    """A unit is dead only if it is dead over all batches."""
    first = holding(nn.Linear(16, 8), weight=lambda w: w.uniform_(0.5, 1.5), bias=0.0)
    inspector = Inspector(nn.Sequential(first, nn.ReLU()))
    negative, positive = -batch.abs(), batch.abs()
    assert not inspector.run_inspection(negative).healthy
    assert inspector.run_batches([negative, positive]).healthy
    assert not inspector.run_batches([negative, negative]).healthy
