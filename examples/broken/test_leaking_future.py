"""A decoder that sees the word it is to predict: a causal mask that is off by one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Causal attention and a perceptron on ``(N, T, width)``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        steps = x.shape[1]
        # The refactor: this was diagonal=1. Each step attends to the next one, too, which is what
        # it is to predict; the loss falls faster than ever.
        future = torch.ones(steps, steps, dtype=torch.bool).triu(diagonal=2)
        h = self.norm1(x)
        x = x + self.attn(h, h, h, attn_mask=future, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Writer(nn.Module):
    """Scores ``(N, T, 50)`` of the next of 50 tokens ``(N, T)``."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50, 32), nn.Embedding(24, 32)
        self.blocks = nn.Sequential(Block(32), Block(32))
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        return self.head(self.blocks(x))


def next_token(scores: Tensor, target: Tensor) -> Tensor:
    """Return the loss of each next token."""
    return F.cross_entropy(scores.flatten(0, 1), target.flatten())


def test_writer(inspector):
    """Fails: the first attention sees one step too far."""
    torch.manual_seed(0)
    tokens = torch.randint(50, (16, 25))
    inspector(Writer()).run_inspection(
        tokens[:, :-1], target=tokens[:, 1:], loss=next_token, probes="causality"
    )
