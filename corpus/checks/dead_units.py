"""Activations most of whose units never fire, and those that open."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from corpus.checks.parts import Applies, Mlp, Net, batch, holding

CHECK = "dead_units"


def dead(layer, fraction=1.0, value=-50.0):
    """Return a layer, a share of whose units is on the flat side of the activation after it."""
    return holding(layer, bias=lambda bias: bias[: round(fraction * len(bias))].fill_(value))


def held_down():
    """Return a perceptron whose first layer is dead."""
    return holding(Mlp(), **{"fc1.bias": -50.0})


def before(activation, fraction=1.0, value=-50.0, units=48, samples=64):
    """Return a model whose activation comes after a layer that is dead to a part."""
    first = dead(nn.Linear(16, units), fraction, value)
    return nn.Sequential(first, activation, nn.Linear(units, 4)), batch(samples, 16)


def between(function, *, is_dead=True):
    """Return a model with an activation, a function, after a layer that may be dead."""
    first = nn.Linear(16, 32)
    return Net(
        lambda m, x: m.head(function(m.fc(x))), fc=dead(first) if is_dead else first, head=(32, 4)
    )


def deep(depth, seed):
    """Return a deep plain network, in which samples line up."""
    torch.manual_seed(seed)
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
    return model, batch(samples, 3, 8, 8)


FLAT = ["relu", "gelu", "silu", "hardswish", "mish", "softplus"]
FLAT = {name: getattr(F, name) for name in FLAT}
FAULTS = {
    # the activation is the culprit; the layer that holds it down is in the cause
    "a layer": (held_down, "fail", "act1", "'fc1'", "the bias of"),
    **{name: (lambda f=f: between(f), "fail", name) for name, f in FLAT.items()},
    # a clamp from zero on computes what relu does, and dies as it does
    "clamp": (lambda: between(lambda x: x.clamp(min=0)), "fail", "relu"),
    "clip": (lambda: between(lambda x: torch.clip(x, min=0)), "fail", "relu"),
    "a PReLU without a slope": (lambda: before(nn.PReLU(init=0.0)), "fail", "1"),
    "two thirds, far below what the others reach": (
        lambda: before(nn.ReLU(), 2 / 3), "fail", "1", "32 of 48",
    ),
    # four samples say nothing about units; of 16 units one would be active by chance in eight,
    # of 8, or where some are, that says too little
    "four samples": (lambda: (held_down(), batch(4, 16)), "unsure", "act1", "at least 32"),
    "eight samples of 16 units": (lambda: before(nn.ReLU(), 1.0, -50.0, 16, 8), "fail", "1"),
    "eight samples of 16 units, most dead": (
        lambda: before(nn.ReLU(), 0.9, -50.0, 16, 8), "unsure", "1",
    ),
    "eight samples of 8 units": (lambda: before(nn.ReLU(), 1.0, -50.0, 8, 8), "unsure", "1"),
    # tokens are samples, and pixels are not
    "64 tokens": (lambda: (before(nn.ReLU())[0], batch(1, 64, 16)), "fail", "1"),
    "one image": (lambda: pixels(1), "unsure", "1"),
    # a gate that starts at zero and learns opens; a buffer of zeros never does
    "a buffer as a gate": (lambda: gated("buffer"), "fail", "relu"),
    # the one unit of a layer can die
    "a hinge without a margin": (lambda: hinged(None), "fail", "relu"),
}  # fmt: skip
HEALTHY = {
    **{f"alive, {name}": lambda f=f: between(f, is_dead=False) for name, f in FLAT.items()},
    "a clamp from elsewhere": lambda: between(lambda x: x.clamp(min=-100)),
    "a PReLU": lambda: before(nn.PReLU(init=0.25)),
    "a mild shift": lambda: before(nn.ReLU(), 2 / 3, -0.2),
    # its rows sum to one
    "a projection onto the simplex": chosen,
    "a gate": lambda: gated("parameter"),
    "a layer as a gate": lambda: gated("layer"),
    "a layer that starts at zero": lambda: gated("zeros"),
    # a number below its margin is what the loss asks for
    "a hinge that is satisfied": lambda: hinged(-10.0),
    **{
        f"{depth} fresh layers, seed {seed}": lambda d=depth, s=seed: deep(d, s)
        for depth in (5, 20)
        for seed in range(3)
    },
}
