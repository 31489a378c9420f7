"""Models that show who feeds whom: a trunk of blocks, cells over steps, a forward of choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block with a gate on its branch."""

    def __init__(self, residual: bool = True) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 8)
        self.gate = nn.Parameter(torch.ones(8))
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        branch = self.gate * self.fc2(F.gelu(self.fc1(x)))
        return x + branch if self.residual else branch


class Net(nn.Module):
    """Two towers: a trunk of blocks, and a side branch that is detached or not."""

    def __init__(self, detach: bool = False, residual: bool = True) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block(residual or number != 2) for number in range(5))
        self.side = nn.Linear(4, 8)
        self.head = nn.Linear(16, 3)
        self.unused = nn.Linear(4, 4)
        self.detach = detach

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = block(h)
        self.unused(x)
        h = h.detach() if self.detach else h
        return self.head(torch.cat([h, self.side(x)], dim=1))


class Recurrent(nn.Module):
    """A cell over steps of its own, or over the same input, whose state is handed on."""

    def __init__(self, hand_on: Any, *, takes_steps: bool = True) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(4, 4), nn.Linear(4, 3)
        self.hand_on, self.takes_steps = hand_on, takes_steps

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), 4)
        for step in range(5):
            h = self.cell(x[:, step] if self.takes_steps else x.flatten(1), self.hand_on(h))
        return self.head(h)


class Forgetful(nn.Module):
    """A cell that cuts off its own state, all of it or but for a residual."""

    def __init__(self, *, keeps: bool) -> None:
        super().__init__()
        self.given, self.state, self.keeps = nn.Linear(4, 4), nn.Linear(4, 4), keeps

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        new = torch.tanh(self.given(x) + self.state(h.detach()))
        return h + new if self.keeps else new


class Free(nn.Module):
    """Layers, a mask and a table of constants, used by what a test writes."""

    def __init__(self, run: Callable[..., Any]) -> None:
        super().__init__()
        self.lin, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.token, self.position = nn.Embedding(9, 4), nn.Embedding(9, 4)
        self.register_buffer("mask", torch.ones(5, dtype=torch.bool))
        self.register_buffer("places", torch.arange(5).expand(1, -1))
        self.run = run

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(self, *inputs)
