"""NaN from a softmax: a row of the attention in which everything is masked."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """Self-attention over padded sequences: ``(N, T, 32)`` to ``(N, T, 32)``."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)
        self.projection = nn.Linear(32, 32)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        scores = query @ key.transpose(1, 2) / 32**0.5
        # The refactor: -1e9, which float16 cannot hold, became -inf. An empty sequence has nothing
        # but padding, and the softmax of a row of -inf is 0 divided by 0.
        scores = scores.masked_fill(~mask[:, None, :], float("-inf"))
        return self.projection(torch.softmax(scores, dim=-1) @ value)


class Encoder(nn.Module):
    """One attention layer with its residual and LayerNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.norm(x + self.attention(x, mask))


def test_encoder(inspector):
    """Fails: the NaNs begin at ``attention.softmax``; every layer after it only passes them on."""
    torch.manual_seed(0)
    lengths = torch.randint(1, 13, (64,))
    lengths[5] = 0  # a document without words, as real data has them
    mask = torch.arange(12) < lengths[:, None]
    inspector(Encoder()).run_inspection({"x": torch.randn(64, 12, 32), "mask": mask})
