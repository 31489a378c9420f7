"""What is worth knowing and fails nothing: maps in a row, cancelled biases, gates that open."""

from __future__ import annotations

import torch
from torch import nn

from corpus.checks.parts import Mlp, Net, holding

CHECK = ""
CHECKS = ("wiring", "normalization", "missing_gradients")


def reversible(halves):
    """Return a model that joins its input to itself, and what it does with the halves."""

    def forward(m, x):
        y = m.stem(x).relu()
        return m.head(halves(m, torch.cat([y, y], 1)))

    return Net(forward, stem=(16, 16), f=(16, 16), head=(32, 4))


def coupled(m, x):
    """Return halves of which one is changed by the other, as of a reversible network."""
    one, other = x.chunk(2, 1)
    return torch.cat([one, other + m.f(one).relu()], 1)


def remembering(keeps):
    """Return a model that writes to a memory, and what keeps that for it."""

    def forward(m, x):
        y = m.fc(x).relu()
        m.memory[0] = y.detach()[0]
        return m.head(y + m.memory)

    model = Net(forward, fc=(16, 16), head=(16, 4))
    keeps(model, "memory", torch.zeros(1, 16))
    return model


def gated(start):
    """Return a branch behind a matrix that starts at a number."""
    model = Net(lambda m, x: m.head(x + m.last(m.f(x).relu())), f=(16, 16), last=(16, 16),
                head=(16, 4))  # fmt: skip
    return holding(model, **({} if start is None else {"last.weight": start, "last.bias": start}))


def normalised(*between):
    """Return a linear layer, what comes between, and a batch norm."""
    return nn.Sequential(
        nn.Linear(16, 32), *between, nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)
    )


def activated(*between):
    """Return two modules, of which one ends in the activation that the other begins with."""
    first = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    return nn.Sequential(first, *between, nn.Sequential(nn.ReLU(), nn.Linear(16, 4)))


FAULTS = {
    "two linear maps in a row": (
        lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 4)),
        "note", "2", "'3' takes what it gives", "one linear map", {"3"},
    ),
    "a bias before a norm": (
        lambda: normalised(), "note", "0", "its bias learns nothing: '1' takes away", "bias",
    ),
    "a branch that starts at zero": (
        lambda: gated(0.0), "note", "f", "the gradient of f.weight is exactly zero, until", "opens",
    ),
    "a memory that is no buffer": (
        lambda: remembering(setattr), "note", "", "it keeps", "m.memory[0] =",
    ),
    "twin halves": (
        lambda: reversible(coupled), "note", "", "takes one value twice", "torch.cat([y, y]",
    ),
    "an activation at the end and at the beginning": (
        activated, "note", "1.0", "the result of a relu",
    ),
}  # fmt: skip
HEALTHY = {
    "an activation between": Mlp,
    "a narrow map between": lambda: nn.Sequential(
        nn.Linear(16, 2), nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 4)
    ),
    "a head on a frozen layer": lambda: nn.Sequential(
        nn.Linear(16, 32).requires_grad_(False), nn.Linear(32, 4)
    ),
    "maps that two layers take": lambda: Net(
        lambda m, x: m.one(y := m.base(x)) + m.two(y).relu(), base=(16, 8), one=(8, 4), two=(8, 4)
    ),
    "an activation between bias and norm": lambda: normalised(nn.ReLU()),
    "a bias behind a norm's mean": lambda: nn.Sequential(
        nn.Linear(16, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4)
    ),
    "a memory that is a buffer": lambda: remembering(nn.Module.register_buffer),
    "a layer between equal activations": lambda: activated(nn.Linear(16, 16)),
    "a branch that starts small": lambda: gated(None),
}
