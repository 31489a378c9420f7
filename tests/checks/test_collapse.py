"""The `collapse` check: samples that become one, and units that are one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from corpus.checks.parts import Applies
from corpus.models.hooked import make
from tests.capture.architectures import ARCHITECTURES


def around(function):
    """A model with such a layer in the middle."""
    return nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), Applies(function), nn.Linear(32, 32), nn.Linear(32, 4)
    )


def found(report):
    """The layers that the check names, and those that it cannot judge."""
    return [v.layer for v in report.violations if v.check == "collapse"]


def undecided(report):
    """The layers that the check cannot judge."""
    return [i.layer for i in report._judgement.inconclusive if i.check == "collapse"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:1].expand_as(x).contiguous(),
        lambda x: x.mean(0, keepdim=True).expand_as(x).contiguous(),
        lambda x: x * 0 + 0.5,
    ],
    ids=["first sample", "mean over the batch", "constant"],
)
def test_layer_that_makes_all_samples_one_is_named(function, batch, inspect):
    """The layers after it are its consequences."""
    report = inspect(around(function), batch)
    assert found(report) == ["2"]
    assert report.violations[0].message == "its output is the same for all 64 samples"


def test_layer_that_drowns_the_samples_is_named(batch, inspect):
    """A large constant leaves differences far below what the layers before had."""
    assert found(inspect(around(lambda x: x + 1e6), batch)) == ["2"]
    assert found(inspect(around(lambda x: x + 10.0), batch)) == []


def test_equal_samples_in_the_batch_are_no_collapse(mlp, batch, inspect):
    """What goes in equal comes out equal."""
    report = inspect(mlp, batch[:1].expand(64, 16))
    assert found(report) == undecided(report) == []


def test_few_samples_are_inconclusive(batch, inspect):
    """Two samples may be equal by chance, by a shared neighbourhood, by rounding."""
    report = inspect(around(lambda x: x * 0 + 0.5), batch[:4])
    assert found(report) == []
    assert undecided(report) == ["2"]


def test_forward_of_a_container_is_named(batch, inspect):
    """Arithmetic between submodules belongs to the module whose forward does it."""

    class Pools(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 8), nn.Linear(8, 8)

        def forward(self, x):
            h = self.a(x)
            return self.b(h.mean(0, keepdim=True).expand_as(h).contiguous())

    model = nn.Sequential(nn.Linear(16, 16), Pools(), nn.Linear(8, 4))
    report = inspect(model, batch)
    assert found(report) == ["1"]
    assert "between its submodules" in report.violations[0].cause


def test_head_that_starts_at_zero_is_no_collapse(mlp, batch, inspect):
    """Its output is zero for every sample, until the first step."""
    nn.init.zeros_(mlp.head.weight)
    nn.init.zeros_(mlp.head.bias)
    report = inspect(mlp, batch)
    assert report[""].equal_samples
    assert found(report) == []


@pytest.mark.parametrize(
    ("join", "severity"),
    [
        (lambda m, x, y: F.silu(y).mean(1), "fail"),
        (lambda m, x, y: F.silu(2.0 * y + 0).mean(1), "fail"),
        (lambda m, x, y: F.silu(y + m.latents).mean(1), "warn"),
        (lambda m, x, y: F.silu(x + y).mean(1), None),
    ],
    ids=["nothing", "a number", "latents", "a residual"],
)
def test_zero_scale_past_which_no_sample_gets_is_a_collapse(join, severity, inspect):
    """What starts at zero may do so at the end, or where the samples go past it."""

    class Pools(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)
            self.latents = nn.Parameter(torch.randn(5, 8))
            nn.init.zeros_(self.norm.weight)

        def forward(self, x):
            return self.head(join(self, x, self.norm(self.fc(x))))

    report = inspect(Pools(), torch.randn(64, 5, 8))
    told = [v for v in (*report.violations, *report.warnings) if v.check == "collapse"]
    assert [(v.layer, v.severity) for v in told] == [("norm", severity)] * (severity is not None)
    assert all("start or ended at zero" in v.cause for v in told)


@pytest.mark.parametrize("layer", ["fc1", "fc2"])
def test_units_with_equal_weights_are_one(layer, mlp, batch, inspect):
    """Random values in a row, yet the same row for every unit; the biases differ."""
    weight = mlp.get_submodule(layer).weight
    with torch.no_grad():
        weight.copy_(weight[:1].expand_as(weight))
    assert found(inspect(mlp, batch)) == [layer]


def test_channels_with_equal_kernels_are_one(inspect):
    """The units of a convolution are its channels."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    images = torch.randn(16, 3, 8, 8)
    assert found(inspect(model, images)) == []
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight[:1].expand_as(model[0].weight))
    assert found(inspect(model, images)) == ["0"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("depth", [5, 20])
def test_deep_plain_network_is_no_collapse(depth, dtype, inspect):
    """Samples line up little by little; in bfloat16 the last layers round them to one."""
    layers = [m for _ in range(depth) for m in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(64, 4)).to(dtype)
    assert found(inspect(model, torch.rand(64, 64, dtype=dtype))) == []


def test_samples_that_rounding_makes_equal_are_inconclusive(inspect):
    """Forty layers bring them so close that bfloat16 tells them apart no more."""
    layers = [m for _ in range(40) for m in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(64, 4)).to(torch.bfloat16)
    report = inspect(model, torch.rand(64, 64, dtype=torch.bfloat16))
    assert report[""].equal_samples
    assert found(report) == []
    assert len(undecided(report)) == 1


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "t5", "sam"])
def test_positions_and_class_tokens_are_equal_for_all_samples(name, inspect):
    """They are features of the model, and the output differs all the same."""
    model, inputs = make(ARCHITECTURES[name])
    assert found(inspect(model, inputs)) == []


class TwoWays(nn.Module):
    """A layer that drops what it is given, beside one that does not."""

    def __init__(self, factor):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(8, 4)
        forward = self.a.forward
        self.a.forward = lambda x: forward(x * factor)

    def forward(self, x):
        return self.head(torch.tanh(self.a(x)) + self.b(x))


@pytest.mark.parametrize(("factor", "samples"), [(0.0, 64), (1.0, 64), (0.0, 4)])
def test_layer_that_drops_its_inputs_beside_another(factor, samples, batch, inspect):
    """The output still tells the samples apart; the layer does not. Four samples say too little."""
    report = inspect(TwoWays(factor), batch[:samples])
    found = [v.layer for v in report.violations if v.check == "collapse"]
    assert found == (["a"] if factor == 0.0 and samples == 64 else [])


def test_zero_weights_beside_another_way_are_a_gate(batch, inspect):
    """A branch that starts at zero drops nothing: it has not begun."""
    model = TwoWays(1.0)
    nn.init.zeros_(model.a.weight)
    assert not [v for v in inspect(model, batch).violations if v.check == "collapse"]


def test_bias_where_the_targets_are(batch, inspect):
    """A regression may start at the mean of its targets; elsewhere such a bias drowns it."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    nn.init.constant_(model[2].bias, 1e6)
    near, far = 1e6 + torch.randn(64, 1), torch.randn(64, 1)
    for target, expected in ((near, []), (far, ["2"])):
        report = inspect(model, batch, target, loss=nn.functional.mse_loss)
        assert [v.layer for v in report.violations if v.check == "collapse"] == expected


@pytest.mark.parametrize(("factor", "names"), [(1.0, []), (1e-3, []), (1e-7, ["0"])])
def test_batch_in_too_large_a_unit(factor, names, batch, inspect):
    """The first layer's bias leaves nothing of inputs of 1e-7; of 1e-3 it leaves enough."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    report = inspect(model, factor * batch)
    assert [v.layer for v in report.violations if v.check == "collapse"] == names


def test_samples_that_differ_by_little_on_purpose(batch, inspect):
    """Differences for a derivative: what the inputs have in common reaches the output."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    near = batch[:1] + 1e-6 * torch.randn(64, 16)
    assert not [v for v in inspect(model, near).violations if v.check == "collapse"]


def test_dropout_alone_makes_no_spread(batch, inspect):
    """Samples that are equal but for a dropout are laid to what made them equal."""
    model = nn.Sequential(
        nn.Linear(16, 32), Zero(), nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 4)
    )
    nn.init.constant_(model[4].bias, 1e5)
    nn.init.normal_(model[4].weight, std=0.03)
    found = [v.layer for v in inspect(model, batch, settings=ALONE).violations]
    assert "4" not in found


ALONE = {"checks": ["collapse"]}


class Zero(nn.Module):
    """A factor that is nothing."""

    def forward(self, x):
        return x * 0


class Attentive(nn.Module):
    """Blocks of attention, with residual connections or without."""

    def __init__(self, depth, residual):
        super().__init__()
        self.q, self.k, self.v = (
            nn.ModuleList(nn.Linear(16, 16) for _ in range(depth)) for _ in range(3)
        )
        self.norm, self.head, self.residual = nn.LayerNorm(16), nn.Linear(16, 4), residual

    def forward(self, x):
        for q, k, v in zip(self.q, self.k, self.v, strict=True):
            x = self.norm(x)
            made = (3 * q(x) @ k(x).mT).softmax(-1) @ v(x)
            x = x + made if self.residual else made
        return self.head(x.mean(1))


def test_tokens_that_attention_made_alike_are_named(inspect):
    """Without residual connections attention averages tokens until their keys are equal."""
    tokens = torch.randn(32, 12, 16)
    report = inspect(Attentive(24, residual=False), tokens)
    (violation,) = [v for v in report.violations if "tokens alike" in v.message]
    assert violation.layer.startswith("softmax")
    assert found(inspect(Attentive(16, residual=True), tokens)) == []
    alike = tokens[:, :1].expand_as(tokens).contiguous()
    assert found(inspect(Attentive(2, residual=True), alike)) == []


class Wave(nn.Module):
    """Lays each feature out as a wave whose mean over the positions is `rest` of it, about one."""

    def __init__(self, rest):
        super().__init__()
        self.rest = rest

    def forward(self, x):
        signs = torch.tensor([1.0, -1.0]).repeat(32)
        return x[..., None] * (signs + self.rest) + 1.0


@pytest.mark.parametrize(
    ("rest", "pool", "names"),
    [
        (1e-6, nn.AvgPool1d(64), ["2"]),
        (0.0, nn.AvgPool1d(64), ["2"]),
        (1.0, nn.AvgPool1d(64), []),
        (1e-6, nn.MaxPool1d(64), []),
    ],
)
def test_pooling_layer_is_not_said_to_add_anything(rest, pool, names, batch, inspect):
    """It has no parameters to add or to multiply by: what differs cancels out in it."""
    model = nn.Sequential(nn.Linear(16, 8), Wave(rest), pool, nn.Flatten(), nn.Linear(8, 3))
    found = [v for v in inspect(model, batch).violations if v.check == "collapse"]
    assert [v.layer for v in found] == names
    assert all("cancels out" in v.cause and "adds" not in v.cause for v in found)


class Aside(nn.Module):
    """A layer that makes all samples one, or nearly, and another that runs aside of the output."""

    def __init__(self, function, when):
        super().__init__()
        self.fc, self.act, self.head = nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)
        self.aside, self.collapses, self.when = nn.Linear(16, 4), Applies(function), when

    def forward(self, x):
        h = self.act(self.fc(x))
        if self.when == "before":
            self.aside(x)
        out = self.head(self.collapses(h))
        if self.when == "after":
            self.aside(x)
        return out


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("function", "names"),
    [(lambda x: x * 0 + 0.5, ["collapses"]), (lambda x: x + 1e6, ["collapses"]), (abs, [])],
    ids=["constant", "drowned", "healthy"],
)
def test_what_runs_aside_of_the_output_hides_nothing(when, function, names, batch, inspect):
    """Neither the layer that did it nor that the output is lost."""
    assert found(inspect(Aside(function, when), batch, settings=ALONE)) == names


def test_spread_that_another_branch_brings_back_is_not_lost(batch, inspect):
    """What the head is given differs by the other branch."""

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = (
                around(lambda x: x + 1e6)[:3],
                nn.Linear(16, 32),
                nn.Linear(64, 4),
            )

        def forward(self, x):
            b = self.b(x)
            return self.head(torch.cat([self.a(x) * 1e-6, b], 1))

    assert found(inspect(Both(), batch)) == []


@pytest.mark.parametrize("most", [3, 5, 8])
def test_flow_that_ends_before_the_output_breaks_nothing(most, batch, inspect, monkeypatch):
    """Of a run of too many operations the rest was not followed; who did it is still named."""
    monkeypatch.setattr("pytest_modelhealth.capture.observing.flow.rows.MOST_VERTICES", most)
    report = inspect(around(lambda x: x * 0 + 0.5), batch, settings=ALONE)
    assert not report.flow.is_exact
    assert not report._judgement.broken
    assert found(report) == ["2"]


@pytest.mark.parametrize(("start", "names"), [(0.0, [""]), (1.0, [])])
def test_scale_that_starts_at_zero_excuses_its_branch_alone(start, names, batch, inspect):
    """Features times a condition of zero are lost: nothing goes past the product."""

    class Modulated(nn.Module):
        def __init__(self):
            super().__init__()
            self.condition, self.features = nn.Linear(16, 32), nn.Linear(16, 32)
            self.head = nn.Linear(32, 4)
            self.condition.weight.data.mul_(start)
            self.condition.bias.data.zero_()

        def forward(self, x):
            features = torch.tanh(self.features(x))
            return self.head(features * self.condition(x))

    assert found(inspect(Modulated(), batch, settings=ALONE)) == names


class Ratio(nn.Module):
    """The ratio of a policy and the old one, which `old` makes of what it is given."""

    def __init__(self, old):
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
        self.second, self.old = nn.Linear(1, 1), old

    def forward(self, x):
        new = torch.relu(self.policy(x)).squeeze(-1)
        with torch.no_grad():
            old = self.old(self, x, new)
        ratio = (new - old).exp()
        return {"loss": (ratio * x[:, 0]).mean(), "ratio": ratio}


@pytest.mark.parametrize(
    "old",
    [
        lambda model, x, new: new.detach(),
        lambda model, x, new: torch.relu(model.policy(x)).squeeze(-1),
    ],
    ids=["itself", "a second forward"],
)
def test_a_value_beside_itself_is_equal_on_purpose(old, batch, inspect):
    """The ratio is one for each sample, and its gradient is what is wanted."""
    report = inspect(Ratio(old), batch, target=None, loss=None)
    assert report.observation.layers[""].equal_samples
    assert found(report) == []


@pytest.mark.parametrize(
    "function",
    [
        lambda new: new - new,
        lambda new: (new - new.detach()) + 0.0 * new,
        lambda new: torch.full_like(new, new.mean().item()),
    ],
    ids=["from itself, with its gradient", "with another way", "the mean"],
)
def test_another_value_that_is_equal_is_named(function, batch, inspect):
    """Only what passes no other way than the one without gradient is meant so."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.policy = nn.Linear(16, 1)

        def forward(self, x):
            return function(self.policy(x))

    assert found(inspect(Model(), batch)) == [""]


class Steps(nn.Module):
    """Integrates a derivative over six steps, of which `carry` says how they go on."""

    def __init__(self, carry):
        super().__init__()
        self.start, self.derivative = nn.Linear(16, 8), nn.Linear(8, 8)
        self.observe, self.carry = nn.Linear(8, 1), carry

    def forward(self, x):
        start = state = self.start(x)
        seen = []
        for _ in range(6):
            before = start if self.carry == "none" else state
            state = before + 0.3 * self.derivative(before)
            seen.append(self.observe(state))
        return seen[-1].expand(-1, 6) if self.carry == "last" else torch.cat(seen, 1)


@pytest.mark.parametrize("carry", ["none", "last", "all"])
def test_one_prediction_for_several_targets_is_warned_of(carry, inspect):
    """Steps that all begin at the start, or a last one that is repeated."""
    batch, target = torch.randn(64, 16), torch.randn(64, 6)
    report = inspect(Steps(carry), batch, target=target, loss=nn.MSELoss())
    said = [v for v in report.warnings if v.check == "collapse"]
    assert [v.layer for v in said] == ([] if carry == "all" else [""])


def test_predictions_that_are_bounded_are_left_alone(inspect):
    """They end at the same numbers, and are not the same."""
    model = nn.Sequential(nn.Linear(16, 6), nn.Hardtanh())
    with torch.no_grad():
        model[0].weight.mul_(4.0)
    target = torch.randn(64, 6)
    report = inspect(model, torch.randn(64, 16), target=target, loss=nn.MSELoss())
    assert not [v for v in (*report.violations, *report.warnings) if v.check == "collapse"]


def test_weights_that_share_a_mean_drown_no_batch(inspect):
    """Their scale is not what comes of the inputs, and the bias adds little to that."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    with torch.no_grad():
        model[0].weight.normal_(1.0, 1e-7)
        model[0].bias.uniform_(-0.1, 0.1)
    shares = torch.softmax(0.01 * torch.randn(64, 16), -1)
    assert found(inspect(model, shares)) == []
