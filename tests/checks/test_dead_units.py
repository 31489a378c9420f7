"""The `dead_units` check: activations most of whose units never fire."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_modelhealth import ModelHealthWarning


def kill(layer, fraction=1.0):
    """Hold part of a layer's units on the flat side of the activation after it."""
    with torch.no_grad():
        layer.bias[: round(fraction * len(layer.bias))] = -50.0


def test_dead_layer_is_named_with_its_cause(mlp, batch, inspect, only):
    """The activation is the culprit; the layer that holds it down is in the cause."""
    kill(mlp.fc1)
    violation = only(inspect(mlp, batch), "dead_units")
    assert (violation.layer, violation.role) == ("act1", "activations")
    assert (violation.value, violation.limit, violation.origin) == (1.0, 0.8, "default")
    assert "'fc1'" in violation.cause
    assert "bias" in violation.cause


@pytest.mark.parametrize(
    ("fraction", "limit", "healthy"), [(0.5, 0.6, True), (0.5, 0.4, False), (0.75, 0.75, True)]
)
def test_limit_is_the_largest_fraction_allowed(fraction, limit, healthy, batch, inspect):
    """A dead fraction equal to its limit passes; `value` is the true fraction."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    with torch.no_grad():
        model[0].bias.fill_(50.0)
    kill(model[0], fraction)
    report = inspect(model, batch, settings={"max_dead_fraction": limit})
    assert report["1"].activations.dead_fraction == fraction
    assert report.healthy is healthy


class Between(nn.Module):
    """Two layers with a function between them."""

    def __init__(self, function):
        super().__init__()
        self.fc, self.head, self.function = nn.Linear(16, 32), nn.Linear(32, 4), function

    def forward(self, x):
        return self.head(self.function(self.fc(x)))


@pytest.mark.parametrize("function", ["relu", "gelu", "silu", "hardswish", "mish", "softplus"])
def test_every_activation_with_a_flat_side_can_die(function, batch, inspect, only):
    """Functional activations are judged like modules, smooth ones like ReLU."""
    model = Between(getattr(F, function))
    assert inspect(model, batch).healthy
    kill(model.fc)
    report = inspect(model, batch)
    assert report.violations[0].check == "dead_units"
    assert report.violations[0].layer == function


def test_activation_without_a_flat_side_does_not_die(batch, inspect):
    """LeakyReLU passes a gradient on both sides."""
    model = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(), nn.Linear(32, 4))
    kill(model[0])
    assert inspect(model, batch).healthy


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("elu", F.elu),
        ("selu", F.selu),
        ("celu", F.celu),
        ("threshold", lambda x: F.threshold(x, 0.1, 0.25)),
    ],
)
def test_activation_dies_at_its_floor(name, activation, batch, inspect):
    """ELU and its kin end at a negative constant, a threshold at its value, without a gradient."""
    model = Between(activation)
    assert inspect(model, batch).healthy
    kill(model.fc)
    (violation,) = inspect(model, batch).violations
    assert (violation.check, violation.layer, violation.value) == ("dead_units", name, 1.0)


@pytest.mark.parametrize(("slope", "healthy"), [(0.25, True), (0.0, False)])
def test_prelu_dies_without_a_slope(slope, healthy, batch, inspect):
    """A PReLU passes a gradient on both sides unless it learnt not to."""
    model = nn.Sequential(nn.Linear(16, 32), nn.PReLU(init=slope), nn.Linear(32, 4))
    kill(model[0])
    found = inspect(model, batch).violations
    assert ("1" in {v.layer for v in found if v.check == "dead_units"}) is not healthy


class Rectifier(nn.Module):
    """A rectifier that torch does not know."""

    def forward(self, x):
        return x * (x > 0)


def test_rectifier_of_the_projects_own_can_die(batch, inspect):
    """A module that holds nothing and never goes below zero is an activation."""
    model = nn.Sequential(nn.Linear(16, 32), Rectifier(), nn.Linear(32, 4))
    assert inspect(model, batch).healthy
    kill(model[0])
    violation = inspect(model, batch).violations[0]
    assert (violation.check, violation.layer) == ("dead_units", "1")
    assert "'0'" in violation.cause


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
    model = Between(clamp)
    assert ("relu" in inspect(model, batch).layers) is is_rectifier
    kill(model.fc)
    found = {(v.check, v.layer) for v in inspect(model, batch).violations}
    assert (("dead_units", "relu") in found) is is_rectifier


def test_projection_onto_the_simplex_leaves_choices_out(batch, inspect):
    """The clamp of a sparsemax is no rectifier: its rows sum to one."""

    class Sparsemax(nn.Module):
        def forward(self, x):
            ordered = x.sort(-1, descending=True).values
            sums = ordered.cumsum(-1) - 1
            kept = (torch.arange(1, x.shape[-1] + 1) * ordered > sums).sum(-1, keepdim=True)
            return (x - sums.gather(-1, kept - 1) / kept).clamp(min=0)

    chooser = nn.Linear(batch.shape[1], 30)
    chooser.bias.data[:2] += 5.0
    report = inspect(nn.Sequential(chooser, Sparsemax(), nn.Linear(30, 4)), batch)
    assert not [v for v in report.violations if v.check == "dead_units"]


def test_dropout_of_everything(batch, inspect):
    """A dropout with p=1 is named as what it is."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Dropout(1.0), nn.Linear(32, 4))
    violation = inspect(model, batch).violations[0]
    assert violation.layer == "1"
    assert "its rate is 1" in violation.cause


@pytest.mark.parametrize(("bias", "healthy"), [(-50.0, False), (-0.2, True)])
def test_units_that_something_holds_down(bias, healthy, batch, inspect):
    """Two thirds of the units far below what the others reach are a fault; a mild shift is none."""
    model = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 4))
    with torch.no_grad():
        model[0].bias[:32] = bias
    report = inspect(model, batch)
    assert report.healthy is healthy
    for violation in report.violations:
        assert (violation.value, violation.limit) == (pytest.approx(2 / 3), 0.5)


@pytest.mark.parametrize("samples", [2, 4])
def test_few_samples_are_inconclusive(samples, mlp, batch, inspect):
    """Two or four samples say nothing about units; the reason says how many would."""
    kill(mlp.fc1)
    report = inspect(mlp, batch[:samples])
    assert report.verdict == "inconclusive"
    (finding,) = report._judgement.inconclusive
    assert finding.layer == "act1"
    assert "at least 32" in finding.reason
    with pytest.warns(ModelHealthWarning, match="inconclusive: act1"):
        report.assert_healthy()


@pytest.mark.parametrize(("units", "fraction"), [(16, 1.0), (16, 0.9), (8, 1.0)])
def test_eight_samples_tell_that_a_wide_layer_is_silent(units, fraction, inspect):
    """Of 16 units one would be active by chance; of 8, or where some are, that says too little."""
    model = nn.Sequential(nn.Linear(16, units), nn.ReLU(), nn.Linear(units, 4))
    kill(model[0], fraction)
    verdict = inspect(model, torch.randn(8, 16)).verdict
    assert verdict == ("unhealthy" if (units, fraction) == (16, 1.0) else "inconclusive")


def test_tokens_are_samples_but_pixels_are_not(inspect):
    """A sequence of 64 tokens is evidence; one image of 64 pixels is not."""
    tokens = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))
    kill(tokens[0])
    assert inspect(tokens, torch.randn(1, 64, 16)).verdict == "unhealthy"
    pixels = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1))
    kill(pixels[0])
    assert inspect(pixels, torch.randn(1, 3, 8, 8)).verdict == "inconclusive"
    assert inspect(pixels, torch.randn(32, 3, 8, 8)).verdict == "unhealthy"


def test_channels_are_the_units_of_a_convolution(inspect):
    """One dead channel of four is a quarter, however many pixels it has."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    with torch.no_grad():
        model[1].bias[0] = -50.0
    assert inspect(model, torch.randn(32, 3, 8, 8))["2"].activations.dead_fraction == 0.25


def test_dead_in_one_batch_but_not_in_another_is_alive(inspect, batch):
    """A unit is dead only if it is dead over all batches."""
    from pytest_modelhealth import Inspector

    model = nn.Sequential(nn.Linear(16, 8), nn.ReLU())
    with torch.no_grad():
        model[0].weight.uniform_(0.5, 1.5)
        model[0].bias.fill_(0.0)
    inspector = Inspector(model)
    negative, positive = -batch.abs(), batch.abs()
    assert not inspector.run_inspection(negative).healthy
    assert inspector.run_batches([negative, positive]).healthy
    assert not inspector.run_batches([negative, negative]).healthy


@pytest.mark.parametrize("depth", [5, 20])
def test_deep_plain_relu_network_is_healthy_when_initialised(depth, inspect):
    """Samples line up in a deep ReLU network, so that about half the units are off for all."""
    for seed in range(5):
        torch.manual_seed(seed)
        layers = [m for _ in range(depth) for m in (nn.Linear(64, 64), nn.ReLU())]
        report = inspect(nn.Sequential(*layers), torch.rand(64, 64))
        assert not [v for v in report.violations if v.check == "dead_units"]


class Gated(nn.Module):
    """Two ways behind a gate, one of them through a ReLU; beside it a projection that is zero."""

    def __init__(self, kind):
        super().__init__()
        self.fc, self.side = nn.Linear(16, 16), nn.Linear(16, 16)
        self.relu, self.skip, self.head = nn.ReLU(), nn.Linear(16, 4), nn.Linear(16, 4)
        self.kind = kind
        nn.init.zeros_(self.side.weight)
        nn.init.zeros_(self.side.bias)
        if kind == "parameter":
            self.gate = nn.Parameter(torch.zeros(16))
        self.register_buffer("closed", torch.zeros(16))

    def forward(self, x):
        h, side = self.fc(x), self.side(x)
        gate = {"parameter": getattr(self, "gate", None), "buffer": self.closed, "layer": side}
        h = h * gate[self.kind]
        return self.skip(h + side) + self.head(self.relu(h)), self.skip(h)


@pytest.mark.parametrize(
    ("kind", "found"), [("parameter", []), ("layer", []), ("buffer", ["relu"])]
)
def test_silence_behind_a_gate_that_opens_is_no_death(kind, found, batch, inspect):
    """A gate that starts at zero and learns opens; a buffer of zeros never does."""
    report = inspect(Gated(kind), batch)
    violations = [v for root in report.violations for v in (root, *root.folded)]
    assert [v.layer for v in violations if v.check == "dead_units"] == found


def test_silence_of_a_layer_that_starts_at_zero_is_no_death(batch, inspect):
    """What it feeds is zero until it has learnt; another way lets it."""
    model = Gated("buffer")
    model.forward = lambda x: model.skip(h := model.side(x)) + model.head(model.relu(h))
    report = inspect(model, batch)
    assert not [v for v in report.violations if v.check == "dead_units"]


class Hinged(nn.Module):
    """Scores of one unit, and what they lack to a margin."""

    def __init__(self, margin):
        super().__init__()
        self.fc, self.score, self.margin = nn.Linear(16, 32), nn.Linear(32, 1), margin

    def forward(self, x):
        score = self.score(torch.tanh(self.fc(x)))
        return F.relu(score if self.margin is None else self.margin - score).mean()


@pytest.mark.parametrize(("margin", "dead"), [(-10.0, []), (None, ["relu"])])
def test_a_hinge_that_is_satisfied_is_no_dead_unit(margin, dead, batch, inspect):
    """A number below its margin is what the loss asks for; the one unit of a layer can die."""
    model = Hinged(margin)
    with torch.no_grad():
        model.score.bias.fill_(-10.0 if margin is None else 0.0)
    report = inspect(model, batch)
    assert [v.layer for v in report.violations if v.check == "dead_units"] == dead
