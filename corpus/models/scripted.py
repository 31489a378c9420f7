"""Models that are scripted, traced and frozen: what TorchScript makes of them."""

from __future__ import annotations

import io
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A convolution, a batch norm to fold into it, and a function."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(ins, outs, 3, padding=1), nn.BatchNorm2d(outs)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class Net(nn.Module):
    """Writes in place, and has lists, a layer called twice and one without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(3, 4), Block(4, 4)
        self.act = nn.ReLU(inplace=True)
        self.rest = nn.ModuleList([nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4)])
        self.others = nn.ModuleList([nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4)])
        self.head = nn.Linear(4, 3, bias=False)
        for norm in (self.first.bn, self.second.bn):
            give_statistics(norm)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.act(x + self.second(x)).mean((2, 3))
        for layer in self.rest:
            x = layer(x)
        for layer in self.others:
            x = layer(x)
        x[:, 0] = 1.0
        return self.head(self.rest[0](self.rest[0](x))).softmax(-1)


class Flow(nn.Module):
    """Runs layers on conditions, in loops and in lists of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.rnn = nn.LSTM(6, 6, batch_first=True, bidirectional=True)
        self.cell, self.step = nn.Linear(6, 6), nn.Linear(6, 6)
        self.yes, self.no = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor, scale: float = 2.0) -> tuple[Tensor, dict[str, Tensor]]:
        values, (last, _) = self.rnn(self.embedding(x))
        forth, back = values.chunk(2, 2)
        h = torch.zeros_like(forth[:, 0])
        for t in range(x.shape[1]):
            h = torch.tanh(self.cell(h + forth[:, t]))
        for _round in range(x.shape[0]):
            h = self.step(h)
        parts = [h]
        parts.append(back[:, 0] * scale)
        h = torch.stack(parts).sum(0)
        y = self.yes(h) if bool(x.sum() > 0) else self.no(h)
        return y, {"last": last}


def give_statistics(norm: nn.Module) -> None:
    """Let a batch norm do something that a fold has to keep."""
    with torch.no_grad():
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        norm.weight.normal_()
        norm.bias.normal_()


def loaded(script: nn.Module) -> nn.Module:
    """Return what a file has of a script."""
    file = io.BytesIO()
    torch.jit.save(script, file)
    file.seek(0)
    return torch.jit.load(file)


def inlined(model: nn.Module, batch: Tensor) -> nn.Module:
    """Put the code of all layers into the graph of a script, which keeps its parameters.

    A script that was loaded shares its graph with no other.
    """
    script = loaded(torch.jit.script(model))
    torch._C._jit_pass_inline(script.graph)
    return script


def trace(model: nn.Module, batch: Tensor) -> nn.Module:
    """Trace a model."""
    return torch.jit.trace(model, batch, check_trace=False, strict=False)


MAKERS: dict[str, Callable[[nn.Module, Tensor], nn.Module]] = {
    "scripted": lambda model, _: torch.jit.script(model),
    "traced": trace,
    "in a file": lambda model, _: loaded(torch.jit.script(model)),
    "inlined": inlined,
    "frozen": lambda model, _: torch.jit.freeze(torch.jit.script(model)),
    "frozen, traced": lambda model, batch: torch.jit.freeze(trace(model, batch)),
    "optimised": lambda model, _: torch.jit.optimize_for_inference(torch.jit.script(model)),
    "optimised, traced": lambda model, batch: torch.jit.optimize_for_inference(trace(model, batch)),
    "frozen, in a file": lambda model, _: loaded(torch.jit.freeze(torch.jit.script(model))),
}
"""What becomes of a model."""


class TwoOutputs(nn.Module):
    """Two of these share their code in a script."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.act = nn.Linear(6, 6), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.act(self.lin(x)), x * 2


class Blocks(nn.Module):
    """Tuples, a shared layer, a loop and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = TwoOutputs(), TwoOutputs()
        self.rest = nn.ModuleList([nn.Linear(6, 6), nn.Tanh()])
        self.never = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.first(x)
        for _ in range(2):
            y, u = self.second(y + z)
            z = z + u
        if x.shape[0] == 0:
            y = self.never(y)
        for layer in self.rest:
            y = layer(y)
        return y + z
