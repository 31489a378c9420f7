"""The `grad_norm` check: bounds of the user's, and what depth and weights explain."""

import math

import pytest
import torch
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
    assert report.healthy


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
    (line,) = report.judgement.inconclusive
    assert "normalises nothing" in line.reason


@pytest.mark.parametrize(("scale", "is_named"), [(1.0, False), (1e6, True)])
def test_targets_far_larger_than_outputs_are_named(scale, is_named, mlp, batch, inspect):
    """Gradients explode with targets that nobody standardised, and no weight is to blame."""
    target = scale * torch.randn(64, 10)
    found = inspect(mlp, batch, target, loss=nn.functional.mse_loss).violations
    assert [v.check for v in found] == (["grad_norm"] if is_named else [])
    if is_named:
        assert "standardise the targets" in found[0].cause
