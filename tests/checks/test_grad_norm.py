"""The `grad_norm` check: bounds of the user's, and what depth and weights explain."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn


def norms(model, inputs, loss):
    """The gradient norm of each layer's own parameters, by plain torch in float64."""
    model.zero_grad()
    loss(model(inputs)).backward()
    return {
        name: math.sqrt(
            sum(p.grad.double().square().sum().item() for p in module.parameters(recurse=False))
        )
        for name, module in model.named_modules()
        if list(module.parameters(recurse=False))
    }


def mean_square(output):
    """A loss without a target."""
    return output.square().mean()


def test_value_is_the_norm_of_the_layers_own_parameters(mlp, batch, inspect):
    """The value reported for each layer is the L2 norm over its weight and bias."""
    truth = norms(mlp, batch, mean_square)
    report = inspect(mlp, batch, loss=mean_square, settings={"max_grad_norm": 0.0})
    assert {v.layer: v.value for v in report.violations} == pytest.approx(truth, rel=1e-6)


@pytest.mark.parametrize(("factor", "broken"), [(1.01, 0), (0.99, 1)])
def test_max_grad_norm(factor, broken, mlp, batch, inspect):
    """A norm over the limit is a violation that names value, limit and origin."""
    largest = max(norms(mlp, batch, mean_square).values())
    settings = {"max_grad_norm": factor * largest}
    report = inspect(mlp, batch, loss=mean_square, settings=settings)
    assert len(report.violations) == broken
    for violation in report.violations:
        assert violation.limit == pytest.approx(factor * largest)
        assert violation.origin == "argument of inspector"


@pytest.mark.parametrize(("factor", "broken"), [(1.01, 1), (0.99, 0)])
def test_min_grad_norm(factor, broken, mlp, batch, inspect):
    """A norm under the limit is a violation."""
    smallest = min(norms(mlp, batch, mean_square).values())
    settings = {"min_grad_norm": factor * smallest}
    report = inspect(mlp, batch, loss=mean_square, settings=settings)
    assert len(report.violations) == broken


def test_norm_over_batches_does_not_grow_with_their_number(mlp, batch):
    """Over batches the norm is the root mean square, so that a limit means the same."""
    from pytest_modelhealth import Inspector

    largest = max(norms(mlp, batch, mean_square).values())
    inspector = Inspector(mlp, max_grad_norm=1.01 * largest)
    pairs = [(batch, torch.zeros(64, 10))] * 5
    report = inspector.run_batches(pairs, loss=nn.functional.mse_loss)
    assert report.observation.batches == 5
    assert report.healthy


@pytest.mark.parametrize("depth", [12, 30])
def test_gradient_that_vanishes_through_depth(depth, batch, inspect):
    """A deep sigmoid network starves its first layers; the first is named, the others counted."""
    layers = [m for _ in range(depth) for m in (nn.Linear(16, 16), nn.Sigmoid())]
    (violation,) = inspect(nn.Sequential(*layers, nn.Linear(16, 4)), batch).violations
    assert (violation.check, violation.layer) == ("grad_norm", "0")
    assert violation.consequences > 0
    assert "shrink" in violation.cause


def test_gradient_that_explodes(batch, inspect):
    """Weights of a standard deviation of 1 magnify forward and backward alike."""
    layers = [m for _ in range(6) for m in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), *layers, nn.Linear(64, 4))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=1.0)
    labels = torch.randint(0, 4, (64,))
    (root,) = inspect(model, batch, labels, loss=nn.functional.cross_entropy).violations
    violation = next(v for v in (root, *root.folded) if v.check == "grad_norm")
    assert violation.value > violation.limit == 1e4
    assert violation.consequences > 0


@pytest.mark.parametrize(("factor", "grows"), [(1e-10, False), (1e10, True)])
def test_layer_where_the_scale_begins_is_named(factor, grows, batch, inspect):
    """One layer off by ten powers of ten is the culprit, not the layers before it that show it."""
    layers = [m for _ in range(6) for m in (nn.Linear(16, 16), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(16, 4))
    with torch.no_grad():
        for linear in model[::2]:
            nn.init.orthogonal_(linear.weight, 2**0.5)
        model[6].weight.mul_(factor)
        model[6].bias.normal_()
    report = inspect(model, batch)
    found = [v for root in report.violations for v in (root, *root.folded)]
    (violation,) = [v for v in found if v.check == "grad_norm"]
    assert violation.layer == "6"
    assert set(violation.affected) >= {"0", "2", "4"}
    assert ("grows" if grows else "shrinks") in violation.message
    assert "its weights" in violation.cause


def test_scale_that_every_layer_loses_belongs_to_none_of_them(batch, inspect):
    """Where each layer shrinks the gradient alike, the first is named, and the factor a layer."""
    layers = [m for _ in range(5) for m in (nn.Linear(16, 16), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(16, 4))
    with torch.no_grad():
        for linear in model[:10:2]:
            nn.init.orthogonal_(linear.weight, 1e-4)
    told = inspect(model, batch).violations
    found = [v for root in told for v in (root, *root.folded) if v.check == "grad_norm"]
    assert [v.layer for v in found] == ["0"]
    assert "times a layer over 5 layers" in found[0].cause


def test_small_gate_on_a_residual_branch_is_healthy(batch, inspect):
    """LayerScale of 1e-6 starves its branch on purpose; the layers before it learn as usual."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
            self.gamma = nn.Parameter(torch.full((16,), 1e-8))

        def forward(self, x):
            return x + self.gamma * self.b(torch.relu(self.a(x)))

    model = nn.Sequential(nn.Linear(16, 16), Block(), Block(), nn.Linear(16, 4))
    assert inspect(model, batch).healthy


class Relative(nn.Module):
    """Residual attention with positions that a small network makes, or whose values vanish."""

    def __init__(self, scale, values, is_fused):
        super().__init__()
        self.qkv, self.place, self.proj = nn.Linear(16, 48), nn.Linear(2, 8), nn.Linear(16, 16)
        self.bias, self.is_fused, self.values = nn.Linear(8, 1), is_fused, values
        self.gamma = nn.Parameter(torch.full((16,), scale))
        nn.init.normal_(self.bias.weight, std=0.02)

    def forward(self, x, places):
        q, k, v = self.qkv(x).chunk(3, -1)
        bias = self.bias(torch.relu(self.place(places)))[None, ..., 0] * self.values
        if self.is_fused:
            made = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.expand(len(x), -1, -1))
        else:
            made = F.dropout((q @ k.transpose(1, 2) / 4 + bias).softmax(-1), 0.0) @ v
        return x + self.gamma * self.proj(made)


class ByClassToken(nn.Module):
    """Tokens behind a stem, attended once, of which one that starts near zero is read."""

    def __init__(self, **options):
        super().__init__()
        self.attention, self.head = Relative(**options), nn.Linear(16, 4)
        self.stem, self.token = nn.Linear(16, 16), nn.Parameter(1e-6 * torch.randn(1, 1, 16))
        self.register_buffer("places", torch.randn(9, 9, 2))

    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), self.stem(x)], 1)
        return self.head(F.layer_norm(self.attention(x, self.places)[:, 0], (16,)))


@pytest.mark.parametrize("is_fused", [True, False])
def test_positions_that_act_by_scores_alone_only_warn(is_fused, inspect):
    """Nearly even weights send little back to what makes positions, the less behind a scale."""
    model, batch = ByClassToken(scale=1e-5, values=1e-3, is_fused=is_fused), torch.randn(16, 8, 16)
    report = inspect(model, batch)
    assert found(report) == []
    assert [v.layer for v in report.warnings if v.check == "grad_norm"] == ["attention.place"]
    assert "the scores of a softmax alone" in report.warnings[0].cause


def test_softmax_that_weighs_nothing_is_no_attention(batch, inspect):
    """Layers before a softmax in mid-network have vanished as others have."""
    layers = [nn.Linear(16, 16) for _ in range(5)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, 1e-3)
    model = nn.Sequential(*layers, nn.Softmax(-1), nn.Linear(16, 16), nn.Linear(16, 4))
    assert found(inspect(model, batch))


def test_scale_of_the_loss_is_no_fault(mlp, batch, inspect):
    """Neither a loss near zero nor a large one says anything about the model."""
    for scale in (1e-6, 1.0, 1e3):
        report = inspect(mlp, batch, loss=lambda out, s=scale: s * out.square().mean())
        assert report.healthy, report.violations


def test_single_layer_of_near_zero_weights_before_a_norm_does_not_explode(batch, inspect):
    """A token that starts at zero gets a huge gradient through LayerNorm; nothing is wrong."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.zeros(1, 16))
            self.norm, self.fc, self.head = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(16, 2)

        def forward(self, x):
            return self.head(self.fc(self.norm(1e-8 * x + self.token)))

    report = inspect(Tokens(), batch, loss=lambda out: out.square().sum())
    token = report[""].parameter_gradients["token"]
    assert token.rms > 1e4 * 0.01
    assert [v.check for v in report.violations if v.check == "grad_norm"] == []


def test_batch_norm_that_has_seen_no_batch_leaves_depth_inconclusive(inspect):
    """In evaluation mode a fresh batch norm normalises nothing: no verdict on depth."""
    blocks = []
    for _ in range(12):
        linear = nn.Linear(16, 16)
        nn.init.normal_(linear.weight, std=0.01)
        blocks += [linear, nn.BatchNorm1d(16)]
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
    found = inspect(mlp, batch, target, loss=nn.functional.mse_loss).violations
    assert [v.check for v in found] == (["grad_norm"] if is_named else [])
    if is_named:
        assert "standardise the targets" in found[0].cause


class InUnits(nn.Module):
    """Its output is in a unit of which there are millions."""

    def __init__(self, *layers):
        super().__init__()
        self.net = nn.Sequential(*layers)

    def forward(self, x):
        return 5e6 + 1e6 * self.net(x)


def test_units_of_a_loss_only_warn(batch, inspect):
    """What comes in large explodes in no layer; what grows in the layers does so in any unit."""
    target = 5e6 + 1e6 * torch.randn(64, 1)
    healthy = InUnits(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    report = inspect(healthy, batch, target, loss=nn.functional.mse_loss)
    assert found(report) == []
    assert "the loss is of that scale" in report.warnings[0].cause
    sick = InUnits(nn.Linear(16, 32), nn.ReLU(), *[nn.Linear(32, 32) for _ in range(6)])
    for layer in sick.net[2:]:
        nn.init.normal_(layer.weight, std=2.0)
    report = inspect(sick, batch, target.expand(-1, 32), loss=nn.functional.mse_loss)
    assert len(found(report)) == 1


def deep(depth, gain=1.0, activation=nn.Tanh):
    """A tower whose layers multiply the gradient by about `gain`."""
    layers = [m for _ in range(depth) for m in (nn.Linear(16, 16), activation())]
    for layer in layers[::2]:
        nn.init.orthogonal_(layer.weight, gain)
    return nn.Sequential(*layers)


class Branches(nn.Module):
    """Two branches of one input, which run one after the other, and a head that takes both."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second, self.head = first, second, nn.Linear(32, 4)

    def forward(self, x):
        return self.head(torch.cat([self.first(x), self.second(x)], 1))


def found(report):
    """What the check finds, also where it is folded under other findings."""
    told = [v for root in report.violations for v in (root, *root.folded)]
    return [v for v in told if v.check == "grad_norm"]


def named(report):
    """The layers that the check names."""
    return [v.layer for v in found(report)]


@pytest.mark.parametrize("bad", ["first", "second"])
def test_gradient_that_vanishes_in_one_branch_beside_a_healthy_one(bad, batch, inspect):
    """Whichever runs first; the healthy one is left alone."""
    branches = {"first": deep(5), "second": deep(5), bad: deep(14, activation=nn.Sigmoid)}
    assert named(inspect(Branches(**branches), batch)) == [f"{bad}.0"]
    assert named(inspect(Branches(deep(5), deep(5)), batch)) == []


class Heads(Branches):
    """Each branch has an output of its own."""

    def __init__(self, first, second):
        super().__init__(first, second)
        del self.head

    def forward(self, x):
        return self.first(x), self.second(x)


def test_branch_of_a_small_loss_is_not_compared_with_another(batch, inspect):
    """Its gradient is small from the output on: no layer has lost it."""

    model = Heads(deep(4), deep(4))
    loss = lambda out: 1e-9 * out[0].square().mean() + out[1].square().mean()  # noqa: E731
    assert named(inspect(model, batch, loss=loss)) == []


class Scaled(nn.Module):
    """A branch scaled by small parameters of the block's own, or of a layer's."""

    def __init__(self, scale, residual=True, apart=False):
        super().__init__()
        self.branch, self.residual = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), residual
        self.gamma = Gamma(scale) if apart else nn.Parameter(torch.full((16,), scale))

    def forward(self, x):
        h = self.branch(x)
        h = self.gamma(h) if isinstance(self.gamma, nn.Module) else self.gamma * h
        return x + h if self.residual else h


class Gamma(nn.Module):
    """A layer that scales."""

    def __init__(self, scale):
        super().__init__()
        self.weight = nn.Parameter(torch.full((16,), scale))

    def forward(self, x):
        return x * self.weight


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("residual", [True, False])
def test_small_scale_is_a_gate_where_something_goes_past_it(apart, residual, batch, inspect):
    """LayerScale starves its branch on purpose; without a sum it starves all before it."""
    model = nn.Sequential(nn.Linear(16, 16), Scaled(1e-8, residual, apart), *deep(3))
    assert bool(named(inspect(model, batch))) is not residual


def test_gate_of_one_branch_excuses_no_other(batch, inspect):
    """What vanishes in a branch without a gate has vanished."""
    gated = nn.Sequential(Scaled(1e-6), nn.Linear(16, 16))
    assert named(inspect(Branches(deep(14, activation=nn.Sigmoid), gated), batch)) == ["first.0"]
    assert named(inspect(Branches(deep(4), gated), batch)) == []


def test_gradient_that_explodes_in_one_branch_beside_a_larger_one(batch, inspect):
    """Half of the layers are those on its own way, not those of all branches."""
    loss = lambda out: 1e9 * out[0].square().mean() + out[1].square().mean()  # noqa: E731
    report = inspect(Heads(deep(6), deep(20)), batch, loss=loss)
    (violation,) = report.warnings
    assert "the loss is of that scale" in violation.cause
    names = {violation.layer, *violation.affected}
    assert names == {f"first.{place}" for place in range(0, 12, 2)}


class Turns(Branches):
    """The layers of both branches run in turns."""

    def forward(self, x):
        y = x
        for first, second in zip(self.first, self.second, strict=True):
            x, y = first(x), second(y)
        return self.head(torch.cat([x, y], 1))


def test_layer_that_loses_a_gradient_is_named_on_its_branch(batch, inspect):
    """Not the layer of another branch that ran before it."""
    model = Turns(deep(6, activation=nn.ReLU), deep(6, activation=nn.ReLU))
    with torch.no_grad():
        model.first[6].weight.mul_(1e-10)
        model.first[6].bias.normal_()
    (violation,) = found(inspect(model, batch))
    assert violation.layer == "first.6"
    assert set(violation.affected) == {"first.0", "first.2", "first.4"}
