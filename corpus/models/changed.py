"""Models with one thing that can be changed: a number, an operation, a dtype, an output."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from corpus.models.paired import Gpt, Mlp


class Shifted(nn.BatchNorm2d):
    """Keeps another average than it made."""

    shift = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.running_mean = self.running_mean + self.shift
        return y


class Mixing(nn.Module):
    """Mixes the samples between the layers of a list, which has no code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.loops = 1.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer((torch.full((8, 8), 0.1) + self.loops * torch.eye(8)) @ x)
        return x


class Spoiled(nn.Linear):
    """A layer with an error in one element."""

    error = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).clone()
        y[3, 5] += self.error
        return y


class Odd(Mlp):
    """Computes something else in float64, where it is therefore no truth."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x if x.dtype == torch.float64 else x)


class Headless(Gpt):
    """Its embedding is tied to nothing, and most words are in no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Identity()


class Block(nn.Module):
    """A residual block with a masked, scaled branch; `wrong` selects a slip in its forward."""

    def __init__(self, wrong=""):
        super().__init__()
        self.norm, self.left, self.right = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("mask", torch.arange(8) % 3 == 0)
        self.wrong = wrong

    def forward(self, x):
        h = self.norm(x)
        left, right = self.left(h), self.right(h)
        if self.wrong != "unmasked":
            left = left.masked_fill(self.mask, 0.0)
        if self.wrong == "rooted":
            left = left.abs().sqrt()
        if self.wrong == "detached":
            return x + torch.tanh(left.detach()) * right
        if self.wrong == "lost":
            return torch.tanh(left) * right
        if self.wrong == "rewritten":
            return torch.tanh((x.exp() - left.square() / 2).clamp(-1, 1).log1p().cos()) - right
        return x + torch.tanh(left) * right


class Scale(nn.Module):
    """A layer of the user's own, with no layer inside."""

    def __init__(self, rooted=False):
        super().__init__()
        self.weight, self.rooted = nn.Parameter(torch.ones(8)), rooted

    def forward(self, x):
        x = x.square()
        return self.weight * (x.sqrt() if self.rooted else x)


class Fork(nn.Module):
    """Layers before, beside and after one that may be kept in a coarser dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.other = (nn.Linear(16, 16) for _ in range(3))
        self.before, self.beside, self.after = (nn.LayerNorm(16) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(self.first(x))
        coarse = self.inner(x.to(self.inner.weight.dtype)).float()
        return self.head(self.after(coarse + self.other(self.beside(x))))


class Both(NamedTuple):
    """Two outputs."""

    logits: Tensor
    hidden: Tensor


class Returning(Mlp):
    """Returns its output in any form."""

    def __init__(self, form: Any) -> None:
        super().__init__()
        self.form = form

    def forward(self, x: Tensor) -> Any:
        return self.form(super().forward(x))


def quantised(model: nn.Module, path: Path) -> nn.Module:
    """Eight bits in the linear layers."""
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


def autocast(module: nn.Module) -> nn.Module:
    """Have a module compute in bfloat16, with weights and outputs in float32."""
    plain = module.forward

    def forward(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return plain(x).float()

    module.forward = forward
    return module


def negated(weight: Tensor) -> None:
    """Other signs in half of the rows."""
    weight[: len(weight) // 2] *= -1


def nudged(weight: Tensor) -> None:
    """One value that is off by a hundredth."""
    weight[0, 0] += 0.01


def cleared(weight: Tensor) -> None:
    """Zeros in eight rows."""
    weight[:8] = 0
