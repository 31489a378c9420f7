"""A refactor that changes the numbers: attention is scaled by the wrong width."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Self-attention ``(N, T, width)`` with the softmax written out."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.projection = nn.Linear(width, width)

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values of all heads."""
        parts = (self.query(x), self.key(x), self.value(x))
        return tuple(part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.split(x)
        weights = (query @ key.mT / key.shape[-1] ** 0.5).softmax(-1)
        return self.projection((weights @ value).transpose(1, 2).flatten(2))


class FusedAttention(Attention):
    """The refactor: one fused call does it all, faster."""

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.split(x)
        mixed = F.scaled_dot_product_attention(query, key, value, scale=x.shape[-1] ** -0.5)
        return self.projection(mixed.transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    """Three residual blocks of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64) for _ in range(3))
        self.attentions = nn.ModuleList(Attention() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            x = x + attention(norm(x))
        return x


def test_fused_attention(inspector):
    """Fails: the fused call divides by the root of the model's width, not of a head's."""
    torch.manual_seed(0)
    old = Encoder()
    new = copy.deepcopy(old)
    for attention in new.attentions:
        attention.__class__ = FusedAttention
    inspector.compare(old, new, torch.randn(8, 12, 64)).assert_equivalent()
