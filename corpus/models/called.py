"""A net whose layers are called by name, more or less often, and one with a tied weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    """Applies its layers by name, in the order of `steps`; a block is run `turns` times."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.act, self.fc = nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.dropout2, self.head = nn.Dropout(0.5), nn.Linear(8, 3)
        self.spare = nn.Linear(8, 8)
        self.steps = ["inp", "fc", "act", "norm", "block", "block", "dropout2", "head"]

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = x + self.block(x) if step == "block" else getattr(self, step)(x)
        return x


class Tied(nn.Module):
    """A language model of one layer, whose head has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.fc(self.embedding(ids))))


def untied(model: Tied) -> None:
    """Give the head a parameter of its own."""
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


def forgotten(model: Tied) -> None:
    """Leave the head as it was made."""
    model.head = nn.Linear(8, 20, bias=False)


def halves(model: Net) -> None:
    """Apply one layer to each half of the batch."""
    inner = model.fc
    model.steps[model.steps.index("fc")] = "in_halves"
    model.in_halves = lambda x: torch.cat([inner(part) for part in x.chunk(2)])


def checkpointed(model: Net) -> None:
    """Compute the activations of one layer again in the backward pass."""
    inner = model.fc
    model.steps[model.steps.index("fc")] = "again"
    model.again = lambda x: checkpoint(inner, x, use_reentrant=False)


def by_its_parts(model: Net) -> None:
    """Call the layers of a block rather than the block."""
    model.steps[model.steps.index("block")] = "parts"
    model.parts = lambda x: x + model.block[1](model.block[0](x))


def by_forward(model: Net) -> None:
    """Call the forward of a layer, which no hook sees."""
    model.steps[model.steps.index("fc")] = "direct"
    model.direct = lambda x: model.fc.forward(x)


def without_effect(model: Net) -> None:
    """Leave out a dropout that does nothing."""
    model.steps.remove("dropout2")


class TwoHeads(nn.Module):
    """Two heads of one form, of which it uses one."""

    def __init__(self, use):
        super().__init__()
        self.stem, self.use = nn.Linear(16, 16), use
        self.a, self.b = nn.Linear(16, 4), nn.Linear(16, 4)

    def forward(self, x):
        return getattr(self, self.use)(self.stem(x).relu())
