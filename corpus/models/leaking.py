"""Small models that leak between samples, from later tokens or padding, and healthy twins."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Hidden = Callable[[Tensor], Tensor]


class Rows(nn.Module):
    """A perceptron with something between its layers."""

    def __init__(self, between: Hidden = F.relu) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(12, 16), nn.Linear(16, 3)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


class Net(nn.Module):
    """Layers, tensors and functions under their names, and a forward that is given them."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def seeded(*shape: int) -> Tensor:
    """Return normal numbers that are always the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def rows(samples: int = 10) -> tuple[Tensor, Tensor]:
    """Return features and classes."""
    return torch.randn(samples, 12), torch.randint(0, 3, (samples,))


class Block(nn.Module):
    """Attention by hand, causal or not, with a mask of padding or without."""

    def __init__(self, width: int, *, causal: bool) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.causal = nn.Linear(width, width), causal

    def forward(self, x: Tensor, real: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / math.sqrt(x.shape[-1])
        if self.causal:
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        if real is not None:
            scores = scores.masked_fill(~real.bool().unsqueeze(1), -1e9)
        return x + self.out(scores.softmax(-1) @ v)


class Writer(nn.Module):
    """A language model of two blocks."""

    def __init__(self, *causal: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(20, 16), nn.Embedding(16, 16)
        self.blocks = nn.ModuleList(Block(16, causal=one) for one in causal)
        self.head = nn.Linear(16, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def language(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of each next word."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


class Reader(nn.Module):
    """A classifier of padded texts."""

    def __init__(self, *, attends: bool = True, pools: bool = True) -> None:
        super().__init__()
        self.words, self.block = nn.Embedding(20, 16), Block(16, causal=False)
        self.head = nn.Linear(16, 3)
        self.attends, self.pools = attends, pools

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.block(self.words(ids), mask if self.attends else None)
        real = mask.unsqueeze(-1).float()
        return self.head((x * real).sum(1) / real.sum(1) if self.pools else x.mean(1))


def texts(samples: int = 6, steps: int = 9) -> dict[str, Tensor]:
    """Return ids, padded with zeros on the right but for the last text, and their mask."""
    mask = torch.arange(steps) < torch.arange(steps - samples + 1, steps + 1).unsqueeze(1)
    ids = torch.randint(1, 20, (samples, steps)) * mask
    return {"ids": ids, "mask": mask.long()}
