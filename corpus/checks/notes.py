"""What is worth knowing and fails nothing: values taken twice that are meant so."""

from __future__ import annotations

import torch
from torch import nn

from corpus.checks.parts import Mlp, Net

CHECK = "wiring"


def reversible(halves):
    """Return a model that joins its input to itself, and what it does with the halves."""

    def forward(m, x):
        y = m.stem(x).relu()
        return m.head(halves(m, torch.cat([y, y], 1)))

    return Net(forward, stem=(16, 16), f=(16, 16), head=(32, 4)), (torch.randn(64, 16),)


def coupled(m, x):
    """Return halves of which one is changed by the other, as of a reversible network."""
    one, other = x.chunk(2, 1)
    return torch.cat([one, other + m.f(one).relu()], 1)


def activated(*between):
    """Return two modules, of which one ends in the activation that the other begins with."""
    first = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
    return nn.Sequential(first, *between, nn.Sequential(nn.ReLU(), nn.Linear(16, 4)))


FAULTS = {
    "twin halves": (
        lambda: reversible(coupled), "note", "", "takes one value twice", "torch.cat([y, y]",
    ),
    "an activation at the end and at the beginning": (
        lambda: (activated(), (torch.randn(64, 16),)), "note", "1.0", "the result of a relu",
    ),
}  # fmt: skip
HEALTHY = {
    "an activation between": lambda: (Mlp(), (torch.randn(64, 16),)),
    "a layer between": lambda: (activated(nn.Linear(16, 16)), (torch.randn(64, 16),)),
}
