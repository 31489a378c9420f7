"""Activations that grow beyond what depth explains."""

from __future__ import annotations

import torch
from torch import nn

from corpus.checks.parts import Net, Scales, batch

CHECK = "activation_scale"


def linears(*gains):
    """Return layers that multiply the scale by each of these."""
    layers = [nn.Linear(16, 16, bias=False) for _ in gains]
    for layer, gain in zip(layers, gains, strict=True):
        nn.init.orthogonal_(layer.weight, gain)
    return layers


def jump(factor, *after):
    """Return a factor in the middle of a model, with weights after it."""
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), Scales(factor), *after, nn.Linear(32, 4))


def stream(depth):
    """Return pre-norm blocks that no normalisation ends."""

    def forward(m, x):
        for norm, branch in zip(m.norms, m.branches, strict=True):
            x = x + branch(norm(x))
        return m.head(x)

    return Net(
        forward, norms=nn.ModuleList(nn.LayerNorm(16) for _ in range(depth)),
        branches=nn.ModuleList(nn.Linear(16, 16) for _ in range(depth)),
        head=nn.Linear(16, 4),
    )  # fmt: skip


def towers(left, right, inputs):
    """Return two towers, whose layers run in turns, and a head that takes both."""

    def forward(m, x, y):
        for left, right in zip(m.left, m.right, strict=True):
            x, y = left(x), right(y)
        return m.head(torch.cat([x, y], 1))

    model = Net(forward, left=nn.Sequential(*left), right=nn.Sequential(*right), head=(32, 4))
    return model, inputs


def columns_beside_words():
    """Return a tower of embedded words beside one of columns."""
    words = nn.Sequential(nn.Embedding(50, 16), nn.Flatten(), nn.Linear(64, 16))
    inputs = torch.randint(50, (64, 4)), 1500.0 + 1000.0 * batch()
    return towers([words, *linears(1.0)], linears(1.0, 1.0), inputs)


def one_of_two(factor):
    """Return a factor in one tower of two."""
    left = [*linears(1.0), Scales(factor), *linears(1.0)]
    return towers(left, linears(1.0, 1.0, 1.0), (batch(), 1e3 * batch()))


def divided(by):
    """Return a number between two layers, in the forward of the model."""
    return Net(
        lambda m, x: m.head(m.b(torch.tanh(m.a(x)) / by)), a=(16, 16), b=(16, 16), head=(16, 4)
    )


FAULTS = {
    "a large factor": (lambda: jump(3000.0, nn.Linear(32, 32)), "fail", "2"),
    "a large factor in a tower": (lambda: one_of_two(3000.0), "fail", "left.1"),
    "a rise over many layers": (lambda: nn.Sequential(*linears(*[3.0] * 12)), "fail", "0"),
    "a rise beside larger steps": (
        lambda: towers(linears(*[3.5] * 5), linears(1.0, 1.0, 60.0, 1.0, 0.1), (batch(), batch())),
        "fail", "left.0",
    ),
    "a factor in a forward": (lambda: divided(3e-4), "fail", "b", "`div` at ", "tanh(m.a(x)) / by"),
}  # fmt: skip
HEALTHY = {
    # growth that is taken back at once is none, and the last layer may be of any scale
    "a small factor": lambda: jump(3.0, nn.Linear(32, 32)),
    "normalised at once": lambda: jump(3000.0, nn.LayerNorm(32)),
    "saturated at once": lambda: jump(3000.0, nn.Tanh()),
    "the scale of targets": lambda: nn.Sequential(
        nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1), Scales(1e5)
    ),
    "40 pre-norm blocks": lambda: stream(40),
    "columns beside words": columns_beside_words,
    "a small factor in a tower": lambda: one_of_two(3.0),
}
