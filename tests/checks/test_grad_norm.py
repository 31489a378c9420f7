"""The `grad_norm` check: bounds of the user's, and what depth and weights explain."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from corpus.checks.parts import Applies
from pytest_modelhealth import Inspector


def mean_square(output):
    """A loss without a target."""
    return output.square().mean()


def of_two(first):
    """A loss of two outputs, of which the first is multiplied by a number."""
    return lambda outputs: first * outputs[0].square().mean() + outputs[1].square().mean()


def found(report):
    """What the check finds, also where it is folded under other findings."""
    told = [v for root in report.violations for v in (root, *root.folded)]
    return [v for v in told if v.check == "grad_norm"]


@pytest.fixture
def norms(mlp, batch):
    """The gradient norm of each layer's own parameters, by plain torch in float64."""
    mean_square(mlp(batch)).backward()
    own = {name: [*module.parameters(recurse=False)] for name, module in mlp.named_modules()}
    truth = {
        name: math.sqrt(sum(p.grad.double().square().sum().item() for p in parameters))
        for name, parameters in own.items()
        if parameters
    }
    mlp.zero_grad()
    return truth


def test_value_is_the_norm_of_the_layers_own_parameters(norms, mlp, batch, inspect):
    """The value reported for each layer is the L2 norm over its weight and bias."""
    report = inspect(mlp, batch, loss=mean_square, settings={"max_grad_norm": 0.0})
    assert {v.layer: v.value for v in report.violations} == pytest.approx(norms, rel=1e-6)


@pytest.mark.parametrize(
    ("setting", "factor", "broken"),
    [
        ("max_grad_norm", 1.01, 0),
        ("max_grad_norm", 0.99, 1),
        ("min_grad_norm", 1.01, 1),
        ("min_grad_norm", 0.99, 0),
    ],
)
def test_bounds_of_the_user(setting, factor, broken, norms, mlp, batch, inspect):
    """A norm beyond a limit is a violation that names limit and origin."""
    limit = factor * (max if setting == "max_grad_norm" else min)(norms.values())
    report = inspect(mlp, batch, loss=mean_square, settings={setting: limit})
    assert len(report.violations) == broken
    for violation in report.violations:
        assert violation.limit == pytest.approx(limit)
        assert violation.origin == "argument of inspector"


def test_norm_over_batches_does_not_grow_with_their_number(norms, mlp, batch):
    """Over batches the norm is the root mean square, so that a limit means the same."""
    inspector = Inspector(mlp, max_grad_norm=1.01 * max(norms.values()))
    pairs = [(batch, torch.zeros(64, 10))] * 5
    report = inspector.run_batches(pairs, loss=nn.functional.mse_loss)
    assert report.observation.batches == 5
    assert report.healthy


def deep(depth, gain=1.0, activation=nn.Tanh):
    """A tower whose layers multiply the gradient by about `gain`."""
    layers = [m for _ in range(depth) for m in (nn.Linear(16, 16), activation())]
    for layer in layers[::2]:
        nn.init.orthogonal_(layer.weight, gain)
    return nn.Sequential(*layers)


def starved():
    """A branch that is too deep for its activation."""
    return deep(14, activation=nn.Sigmoid)


def with_head(*layers):
    """Layers and a small head."""
    return nn.Sequential(*layers, nn.Linear(16, 4))


def sigmoids(depth):
    """A deep sigmoid network as torch starts it."""
    return with_head(*(m for _ in range(depth) for m in (nn.Linear(16, 16), nn.Sigmoid())))


def off(layers, factor):
    """Have the fourth of these layers be off by a factor."""
    with torch.no_grad():
        layers[6].weight.mul_(factor)
        layers[6].bias.normal_()
    return layers


class Branches(nn.Module):
    """Two branches of one input, which run one after the other, and a head that takes both."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second, self.head = first, second, nn.Linear(32, 4)

    def forward(self, x):
        return self.head(torch.cat([self.first(x), self.second(x)], 1))


class Heads(Branches):
    """Each branch has an output of its own."""

    def forward(self, x):
        return self.first(x), self.second(x)


class Turns(Branches):
    """The layers of both branches run in turns."""

    def forward(self, x):
        y = x
        for first, second in zip(self.first, self.second, strict=True):
            x, y = first(x), second(y)
        return self.head(torch.cat([x, y], 1))


class Gamma(nn.Module):
    """A layer that scales."""

    def __init__(self, scale):
        super().__init__()
        self.weight = nn.Parameter(torch.full((16,), scale))

    def forward(self, x):
        return x * self.weight


class Scaled(nn.Module):
    """A branch scaled by small parameters of the block's own, or of a layer's."""

    def __init__(self, scale=1e-8, residual=True, apart=False, act=nn.Identity):
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(16, 16), act(), nn.Linear(16, 16))
        self.gamma = Gamma(scale) if apart else nn.Parameter(torch.full((16,), scale))
        self.residual, self.apart = residual, apart

    def forward(self, x):
        h = self.branch(x)
        h = self.gamma(h) if self.apart else self.gamma * h
        return x + h if self.residual else h


def gated(**options):
    """A scaled branch in mid-network."""
    return nn.Sequential(nn.Linear(16, 16), Scaled(**options), *deep(3))


def gate():
    """A branch of a gate and a layer."""
    return nn.Sequential(Scaled(1e-6), nn.Linear(16, 16))


class Tokens(nn.Module):
    """A token that starts at zero gets a huge gradient through LayerNorm; nothing is wrong."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 16))
        self.norm, self.fc, self.head = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 2)

    def forward(self, x):
        return self.head(self.fc(self.norm(1e-8 * x + self.token)))


class ByClassToken(nn.Module):
    """Attends once by positions that a small network makes, and reads a token that starts small."""

    def __init__(self, is_fused):
        super().__init__()
        self.stem, self.token = nn.Linear(16, 16), nn.Parameter(1e-6 * torch.randn(1, 1, 16))
        self.qkv, self.place, self.proj = nn.Linear(16, 48), nn.Linear(2, 8), nn.Linear(16, 16)
        self.bias, self.head, self.is_fused = nn.Linear(8, 1), nn.Linear(16, 4), is_fused
        self.gamma = nn.Parameter(torch.full((16,), 1e-5))
        self.register_buffer("places", torch.randn(9, 9, 2))
        nn.init.normal_(self.bias.weight, std=0.02)

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), self.stem(x)], 1)
        q, k, v = self.qkv(x).chunk(3, -1)
        bias = self.bias(torch.relu(self.place(self.places)))[None, ..., 0] * 1e-3
        if self.is_fused:
            made = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(len(x), -1, -1))
        else:
            made = F.dropout((q @ k.transpose(1, 2) / 4 + bias).softmax(-1), 0.0) @ v
        return self.head(F.layer_norm((x + self.gamma * self.proj(made))[:, 0], (16,)))


BEFORE, NONE = {"0", "2", "4"}, set()
CASES = {
    "12 sigmoids": (lambda: sigmoids(12), ["0"], {"2"}, "shrink"),
    "30 sigmoids": (lambda: sigmoids(30), ["0"], {"2"}, "shrink"),
    "one layer shrinks": (
        lambda: with_head(*off(deep(6, 2**0.5, nn.ReLU), 1e-10)), ["6"], BEFORE, "its weights"
    ),
    "one layer grows": (
        lambda: with_head(*off(deep(6, 2**0.5, nn.ReLU), 1e10)), ["6"], BEFORE, "its weights"
    ),
    "every layer shrinks": (
        lambda: with_head(*deep(5, 1e-4, nn.ReLU)), ["0"], NONE, "times a layer over 5 layers"
    ),
    "before a softmax that weighs nothing": (
        lambda: with_head(*deep(5, 1e-3, nn.Identity), nn.Softmax(-1), nn.Linear(16, 16)),
        ["0"], NONE, "",
    ),
    "a gate of the block": (gated, [], NONE, ""),
    "a gate of a layer": (lambda: gated(apart=True), [], NONE, ""),
    "gates behind gates": (
        lambda: with_head(nn.Linear(16, 16), Scaled(act=nn.ReLU), Scaled(act=nn.ReLU)),
        [], NONE, "",
    ),
    "a block's scale past which nothing goes": (lambda: gated(residual=False), ["1"], NONE, ""),
    "a layer's scale past which nothing goes": (
        lambda: gated(residual=False, apart=True), ["1.gamma"], NONE, ""
    ),
    "two branches": (lambda: Branches(deep(5), deep(5)), [], NONE, ""),
    "the first vanishes": (lambda: Branches(starved(), deep(5)), ["first.0"], NONE, ""),
    "the second vanishes": (lambda: Branches(deep(5), starved()), ["second.0"], NONE, ""),
    "a gate in the other": (lambda: Branches(deep(4), gate()), [], NONE, ""),
    "a gate excuses no other": (lambda: Branches(starved(), gate()), ["first.0"], NONE, ""),
    "branches in turns": (
        lambda: Turns(off(deep(6, activation=nn.ReLU), 1e-10), deep(6, activation=nn.ReLU)),
        ["first.6"], {"first.0", "first.2", "first.4"}, "",
    ),
}  # fmt: skip
"""The model, the layers named, those affected, and words of the cause."""


@pytest.mark.parametrize("case", CASES)
def test_layer_where_a_gradient_is_lost_or_grows_is_named(case, batch, inspect):
    """On its own branch, and not the layers before it, which show it; a gate loses nothing."""
    build, names, affected, words = CASES[case]
    report = inspect(build(), batch)
    violations = found(report)
    assert [v.layer for v in violations] == names
    assert names or report.healthy, report.violations
    for violation in violations:
        assert set(violation.affected) >= affected
        assert not affected or violation.consequences > 0
        assert words in violation.cause
    if case.startswith("one layer"):
        assert case.split()[-1] in violations[0].message
    if "sigmoids" in case:
        assert len(report.violations) == 1
    if case == "branches in turns":
        assert set(violations[0].affected) == affected


def test_branch_of_a_small_loss_is_not_compared_with_another(batch, inspect):
    """Its gradient is small from the output on: no layer has lost it."""
    assert found(inspect(Heads(deep(4), deep(4)), batch, loss=of_two(1e-9))) == []


def test_gradient_that_explodes(batch, inspect):
    """Weights of a standard deviation of 1 magnify forward and backward alike."""
    layers = [m for _ in range(6) for m in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), *layers, nn.Linear(64, 4))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=1.0)
    labels = torch.randint(0, 4, (64,))
    report = inspect(model, batch, labels, loss=nn.functional.cross_entropy)
    assert len(report.violations) == 1
    violation = found(report)[0]
    assert violation.value > violation.limit == 1e4
    assert violation.consequences > 0


def test_gradient_that_explodes_in_one_branch_beside_a_larger_one(batch, inspect):
    """Half of the layers are those on its own way, not those of all branches."""
    report = inspect(Heads(deep(6), deep(20)), batch, loss=of_two(1e9))
    (violation,) = (warning for warning in report.warnings if warning.check == "grad_norm")
    assert "the loss is of that scale" in violation.cause
    names = {violation.layer, *violation.affected}
    assert names == {f"first.{place}" for place in range(0, 12, 2)}


@pytest.mark.parametrize("is_fused", [True, False])
def test_positions_that_act_by_scores_alone_only_warn(is_fused, inspect):
    """Nearly even weights send little back to what makes positions, the less behind a scale."""
    report = inspect(ByClassToken(is_fused), torch.randn(16, 8, 16))
    assert found(report) == []
    assert [v.layer for v in report.warnings if v.check == "grad_norm"] == ["place"]
    assert "the scores of a softmax alone" in report.warnings[0].cause


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e3])
def test_scale_of_the_loss_is_no_fault(scale, mlp, batch, inspect):
    """Neither a loss near zero nor a large one says anything about the model."""
    report = inspect(mlp, batch, loss=lambda out: scale * mean_square(out))
    assert report.healthy, report.violations


def test_single_layer_of_near_zero_weights_before_a_norm_does_not_explode(batch, inspect):
    """A token that starts at zero gets a huge gradient through LayerNorm; nothing is wrong."""
    report = inspect(Tokens(), batch, loss=lambda out: out.square().sum())
    assert report[""].parameter_gradients["token"].rms > 1e4 * 0.01
    assert [v.check for v in report.violations if v.check == "grad_norm"] == []


def test_batch_norm_that_has_seen_no_batch_leaves_depth_inconclusive(inspect):
    """In evaluation mode a fresh batch norm normalises nothing: no verdict on depth."""
    blocks = [m for _ in range(12) for m in (nn.Linear(16, 16), nn.BatchNorm1d(16))]
    for linear in blocks[::2]:
        nn.init.normal_(linear.weight, std=0.01)
    model, samples = nn.Sequential(*blocks), torch.randn(64, 16)
    assert inspect(model, samples).healthy
    report = inspect(model.eval(), samples)
    assert report.verdict == "inconclusive"
    (line,) = report._judgement.inconclusive
    assert "normalises nothing" in line.reason


@pytest.mark.parametrize(("scale", "is_named"), [(1.0, False), (1e6, True)])
def test_targets_far_larger_than_outputs_are_named(scale, is_named, mlp, batch, inspect):
    """Gradients explode with targets that nobody standardised, and no weight is to blame."""
    target = scale * torch.randn(64, 10)
    violations = inspect(mlp, batch, target, loss=nn.functional.mse_loss).violations
    assert [v.check for v in violations] == (["grad_norm"] if is_named else [])
    if is_named:
        assert "standardise the targets" in violations[0].cause


def in_units(*layers):
    """Layers whose output is in a unit of which there are millions."""
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), *layers, Applies(lambda x: 5e6 + 1e6 * x))


def test_units_of_a_loss_only_warn(batch, inspect):
    """What comes in large explodes in no layer; what grows in the layers does so in any unit."""
    target = 5e6 + 1e6 * torch.randn(64, 1)
    report = inspect(in_units(nn.Linear(32, 1)), batch, target, loss=nn.functional.mse_loss)
    assert found(report) == []
    assert "the loss is of that scale" in report.warnings[0].cause
    sick = in_units(*[nn.Linear(32, 32) for _ in range(6)])
    for layer in sick[2:8]:
        nn.init.normal_(layer.weight, std=2.0)
    report = inspect(sick, batch, target.expand(-1, 32), loss=nn.functional.mse_loss)
    assert len(found(report)) == 1
