"""The `activation_scale` check: where activations begin to grow."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from corpus.checks.parts import Scales


def found(report):
    """The layers that the check names, also where they are folded under others."""
    everything = [v for root in report.violations for v in (root, *root.folded)]
    return [v.layer for v in everything if v.check == "activation_scale"]


@pytest.mark.parametrize(("factor", "names"), [(3.0, []), (3000.0, ["2"])])
def test_layer_that_jumps_is_named(factor, names, batch, inspect):
    """A factor in the middle of the model, with weights after it."""
    model = nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), Scales(factor), nn.Linear(32, 32), nn.Linear(32, 4)
    )
    assert found(inspect(model, batch)) == names


def test_value_is_the_growth(batch, inspect):
    """Root mean square over that of the inputs, by plain torch in float64."""
    model = nn.Sequential(nn.Linear(16, 32), Scales(1e4), nn.Linear(32, 4))
    violation = next(v for v in inspect(model, batch).violations if v.check == "activation_scale")
    with torch.no_grad():
        out = model[:2](batch).double().square().mean().sqrt()
    assert violation.value == pytest.approx((out / batch.double().square().mean().sqrt()).item())


def test_output_may_have_the_scale_of_its_targets(batch, inspect):
    """A regression to house prices ends at 100,000."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1), Scales(1e5))
    assert found(inspect(model, batch)) == []


def test_rise_over_many_layers_begins_at_its_first(batch, inspect):
    """Each layer triples; none is to blame alone, the first is named."""
    layers = [nn.Linear(16, 16, bias=False) for _ in range(12)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, gain=3.0)
    (name,) = found(inspect(nn.Sequential(*layers), batch))
    assert int(name) <= 1


@pytest.mark.parametrize("depth", [4, 40])
def test_residual_stream_may_grow_with_its_depth(depth, batch, inspect):
    """Forty pre-norm blocks without a scale of their own."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.fc = nn.LayerNorm(16), nn.Linear(16, 16)

        def forward(self, x):
            return x + self.fc(self.norm(x))

    blocks = [Block() for _ in range(depth)]
    assert found(inspect(nn.Sequential(*blocks, nn.Linear(16, 4)), batch)) == []


@pytest.mark.parametrize("after", [nn.LayerNorm(32), nn.Tanh()])
def test_growth_that_is_taken_back_at_once_is_not_judged(after, batch, inspect):
    """A normalisation does not mind it, and saturation is another check's."""
    model = nn.Sequential(nn.Linear(16, 32), Scales(3000.0), after, nn.Linear(32, 4))
    assert found(inspect(model, batch)) == []


def deep(depth, std, **options):
    """Return a plain net whose weights have this deviation."""
    layers = []
    for _ in range(depth):
        layers += [nn.Linear(16, 16, **options), nn.Tanh()]
        nn.init.normal_(layers[-2].weight, std=std)
    return nn.Sequential(*layers, nn.Linear(16, 4))


@pytest.mark.parametrize(
    ("std", "options", "fades"),
    [(0.01, {"bias": False}, True), (0.25, {"bias": False}, False), (0.01, {}, False)],
)
def test_activations_that_fade_layer_by_layer(std, options, fades, batch, inspect):
    """The first layer of the row is named; biases hold a signal up."""
    report = inspect(deep(10, std, **options), batch)
    found = [v for v in report.violations if v.check == "activation_scale"]
    assert [v.layer for v in found] == (["0"] if fades else [])
    if fades:
        (violation,) = found
        assert violation.value < violation.limit == 1e-8
        assert "fade" in violation.message


class Stream(nn.Module):
    """Pre-norm blocks whose stream is multiplied by a factor."""

    def __init__(self, factor):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(12))
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(12))
        self.head, self.factor = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4)), factor

    def forward(self, x):
        for norm, branch in zip(self.norms, self.branches, strict=True):
            x = self.factor * x + branch(norm(x))
        return self.head(x)


@pytest.mark.parametrize(("factor", "layer"), [(1.0, None), (4.0, "norms.1"), (10.0, "norms.1")])
def test_stream_that_grows_behind_normalisations(factor, layer, batch, inspect):
    """No activation shows it, what the normalisations are given does."""
    report = inspect(Stream(factor), batch)
    found = [v for v in report.violations if v.check == "activation_scale"]
    assert [v.layer for v in found] == ([] if layer is None else [layer])
    for violation in found:
        assert violation.limit == 100.0**2
        assert violation.role == "inputs"


class Towers(nn.Module):
    """Two towers, whose layers run in turns, and a head that takes both."""

    def __init__(self, left, right):
        super().__init__()
        self.left, self.right = nn.Sequential(*left), nn.Sequential(*right)
        self.head = nn.Linear(32, 4)

    def forward(self, x, y):
        for left, right in zip(self.left, self.right, strict=True):
            x, y = left(x), right(y)
        return self.head(torch.cat([x, y], 1))


def linears(*gains):
    """Layers that multiply the scale by each of these."""
    layers = [nn.Linear(16, 16, bias=False) for _ in gains]
    for layer, gain in zip(layers, gains, strict=True):
        nn.init.orthogonal_(layer.weight, gain)
    return layers


def test_towers_of_different_scale_are_no_growth_of_each_other(batch, inspect):
    """A table of large numbers beside words: each is compared with what feeds it."""
    columns = 1500.0 + 1000.0 * batch
    words = nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(64, 16))
    model = Towers([words, *linears(1.0)], linears(1.0, 1.0))
    assert found(inspect(model, (torch.randint(50, (64, 4)), columns))) == []


@pytest.mark.parametrize(("factor", "names"), [(3.0, []), (3000.0, ["left.1"])])
def test_growth_in_one_tower_beside_one_of_larger_scale(factor, names, batch, inspect):
    """What the other tower is given does not excuse it."""
    left = [*linears(1.0), Scales(factor), *linears(1.0)]
    model = Towers(left, linears(1.0, 1.0, 1.0))
    assert found(inspect(model, (batch, 1000.0 * torch.randn(64, 16)))) == names


def test_rise_is_followed_on_its_own_branch(batch, inspect):
    """The other branch, which runs in turns with it, has larger steps and stays within bounds."""
    model = Towers(linears(3.5, 3.5, 3.5, 3.5, 3.5), linears(1.0, 1.0, 60.0, 1.0, 0.1))
    assert found(inspect(model, (batch, torch.randn(64, 16)))) == ["left.0"]


def test_jumps_on_two_branches_are_two_faults(batch, inspect):
    """Neither is a consequence of the other."""
    left, right = ([*linears(1.0), Scales(f), *linears(1.0)] for f in (3e3, 5e4))
    report = inspect(Towers(left, right), (batch, torch.randn(64, 16)))
    jumps = [v for v in report.violations if v.check == "activation_scale"]
    assert [v.layer for v in jumps] == ["left.1", "right.1"]
    assert "left.2" in jumps[0].affected
    assert "right.2" not in jumps[0].affected


class Factor(nn.Module):
    """A number between two layers, in the forward of the model."""

    def __init__(self, factor):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.factor = factor

    def forward(self, x):
        h = torch.tanh(self.a(x)) / self.factor
        return self.head(self.b(h))


@pytest.mark.parametrize(("factor", "names"), [(1.0, []), (3e-4, ["b"])])
def test_operation_and_line_of_a_factor_are_named(factor, names, batch, inspect):
    """The graph knows what stands between two layers."""
    report = inspect(Factor(factor), batch)
    assert found(report) == names
    for violation in report.violations:
        assert "`div` at " in violation.cause
        assert line_of(violation.cause) == "h = torch.tanh(self.a(x)) / self.factor"


def line_of(cause):
    """The line of this file that a cause names."""
    (number,) = re.findall(re.escape(__file__) + r":(\d+)", cause)
    return Path(__file__).read_text().splitlines()[int(number) - 1].strip()


def test_factor_of_a_stream_is_named(batch, inspect):
    """With its line, where a multiplication lies on the stream."""
    (violation,) = inspect(Stream(10.0), batch).violations
    assert line_of(violation.cause) == "x = self.factor * x + branch(norm(x))"


@pytest.mark.parametrize("factor", [1.0, 10.0])
def test_stream_is_followed_beside_a_tower_of_large_scale(factor, batch, inspect):
    """A norm of raw columns, which run first, is no part of the stream."""

    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            self.columns, self.stream = (
                nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4)),
                Stream(factor),
            )

        def forward(self, x, y):
            return self.columns(x) + self.stream(y)

    report = inspect(Beside(), (1e3 * torch.randn(64, 16), batch))
    assert found(report) == ([] if factor == 1.0 else ["stream.norms.1"])
