"""The `activation_scale` check: where activations begin to grow."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from corpus.checks.parts import Scales


def found(report):
    """What the check finds, also where it is folded under other findings."""
    everything = [v for root in report.violations for v in (root, *root.folded)]
    return [v for v in everything if v.check == "activation_scale"]


def line_of(cause):
    """The line of this file that a cause names."""
    (number,) = re.findall(re.escape(__file__) + r":(\d+)", cause)
    return Path(__file__).read_text().splitlines()[int(number) - 1].strip()


def linears(*gains):
    """Layers that multiply the scale by each of these."""
    layers = [nn.Linear(16, 16, bias=False) for _ in gains]
    for layer, gain in zip(layers, gains, strict=True):
        nn.init.orthogonal_(layer.weight, gain)
    return layers


def jump(factor, *after):
    """A factor in the middle of a model, with weights after it."""
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), Scales(factor), *after, nn.Linear(32, 4))


def fading(std, bias):
    """A plain net whose weights have this deviation."""
    layers = []
    for _ in range(10):
        layers += [nn.Linear(16, 16, bias=bias), nn.Tanh()]
        nn.init.normal_(layers[-2].weight, std=std)
    return nn.Sequential(*layers, nn.Linear(16, 4))


class Stream(nn.Module):
    """Pre-norm blocks whose stream is multiplied by a factor, and a norm before the head or not."""

    def __init__(self, factor, depth=12, norm=True):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(depth))
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(16) if norm else nn.Identity(), nn.Linear(16, 4))
        self.factor = factor

    def forward(self, x):
        for norm, branch in zip(self.norms, self.branches, strict=True):
            x = self.factor * x + branch(norm(x))
        return self.head(x)


class Beside(nn.Module):
    """A norm of raw columns, which runs first and is no part of the stream."""

    def __init__(self, factor):
        super().__init__()
        self.columns = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 4))
        self.stream = Stream(factor)

    def forward(self, x, y):
        return self.columns(x) + self.stream(y)


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


def with_words():
    """A tower of embedded words beside one of columns."""
    words = nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(64, 16))
    return Towers([words, *linears(1.0)], linears(1.0, 1.0))


class Factor(nn.Module):
    """A number between two layers, in the forward of the model."""

    def __init__(self, factor):
        super().__init__()
        self.a, self.b, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.factor = factor

    def forward(self, x):
        h = torch.tanh(self.a(x)) / self.factor
        return self.head(self.b(h))


def left(factor):
    """A factor in one tower of two."""
    return Towers([*linears(1.0), Scales(factor), *linears(1.0)], linears(1.0, 1.0, 1.0))


X = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
Y = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
WORDS = torch.randint(50, (64, 4), generator=torch.Generator().manual_seed(2))
CASES = {
    "a small factor": (lambda: jump(3.0, nn.Linear(32, 32)), X, []),
    "a large factor": (lambda: jump(3000.0, nn.Linear(32, 32)), X, ["2"]),
    "the scale of targets": (
        lambda: nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1), Scales(1e5)), X, []
    ),
    "normalised at once": (lambda: jump(3000.0, nn.LayerNorm(32)), X, []),
    "saturated at once": (lambda: jump(3000.0, nn.Tanh()), X, []),
    "fading": (lambda: fading(0.01, bias=False), X, ["0"]),
    "fading less": (lambda: fading(0.25, bias=False), X, []),
    "held up by biases": (lambda: fading(0.01, bias=True), X, []),
    "4 pre-norm blocks": (lambda: Stream(1.0, 4, norm=False), X, []),
    "40 pre-norm blocks": (lambda: Stream(1.0, 40, norm=False), X, []),
    "a stream": (lambda: Stream(1.0), X, []),
    "a stream that grows": (lambda: Stream(4.0), X, ["norms.1"]),
    "a stream that explodes": (lambda: Stream(10.0), X, ["norms.1"]),
    "a stream beside columns": (lambda: Beside(1.0), (1e3 * Y, X), []),
    "one that explodes beside columns": (lambda: Beside(10.0), (1e3 * Y, X), ["stream.norms.1"]),
    "columns beside words": (with_words, (WORDS, 1500.0 + 1000.0 * X), []),
    "a small factor in a tower": (lambda: left(3.0), (X, 1e3 * Y), []),
    "a large factor in a tower": (lambda: left(3000.0), (X, 1e3 * Y), ["left.1"]),
    "a rise over many layers": (lambda: nn.Sequential(*linears(*[3.0] * 12)), X, ["0"]),
    "a rise beside larger steps": (
        lambda: Towers(linears(*[3.5] * 5), linears(1.0, 1.0, 60.0, 1.0, 0.1)), (X, Y), ["left.0"]
    ),
    "no factor in a forward": (lambda: Factor(1.0), X, []),
    "a factor in a forward": (lambda: Factor(3e-4), X, ["b"]),
}  # fmt: skip
LINES = {
    "a factor in a forward": "h = torch.tanh(self.a(x)) / self.factor",
    "a stream that explodes": "x = self.factor * x + branch(norm(x))",
}


@pytest.mark.parametrize("case", CASES)
def test_layer_where_the_scale_begins_is_named(case, inspect):
    """Each is compared with what feeds it; growth that is taken back at once is none."""
    build, inputs, names = CASES[case]
    report = inspect(build(), inputs)
    violations = found(report)
    assert [v.layer for v in violations] == names
    for violation in violations:
        if "fading" in case:
            assert violation.value < violation.limit == 1e-8
            assert "fade" in violation.message
        if case.startswith("a stream"):  # no activation shows it, what the norms are given does
            assert (violation.role, violation.limit) == ("inputs", 100.0**2)
        if case in LINES:
            assert report.violations == (violation,)
            assert line_of(violation.cause) == LINES[case]
        if case == "a factor in a forward":
            assert "`div` at " in violation.cause


def test_value_is_the_growth(batch, inspect):
    """Root mean square over that of the inputs, by plain torch in float64."""
    model = nn.Sequential(nn.Linear(16, 32), Scales(1e4), nn.Linear(32, 4))
    violation = next(v for v in inspect(model, batch).violations if v.check == "activation_scale")
    with torch.no_grad():
        out = model[:2](batch).double().square().mean().sqrt()
    assert violation.value == pytest.approx((out / batch.double().square().mean().sqrt()).item())


def test_jumps_on_two_branches_are_two_faults(batch, inspect):
    """Neither is a consequence of the other."""
    towers = ([*linears(1.0), Scales(f), *linears(1.0)] for f in (3e3, 5e4))
    jumps = inspect(Towers(*towers), (batch, torch.randn(64, 16))).violations
    jumps = [v for v in jumps if v.check == "activation_scale"]
    assert [v.layer for v in jumps] == ["left.1", "right.1"]
    assert "left.2" in jumps[0].affected
    assert "right.2" not in jumps[0].affected
