"""Positions that are added to what is not used."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Reader(nn.Module):
    """Ids ``(N, T)`` to 5 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 32), nn.Embedding(64, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, ids: Tensor) -> Tensor:
        words = self.words(ids)
        placed = words + self.places(torch.arange(ids.shape[1]))
        pooled = self.block(words).mean(1)  # the fault: not of `placed`
        return self.head(pooled + placed.mean(1))


def test_reader(inspector):
    """Fails: words in another order are read as the same."""
    torch.manual_seed(0)
    ids, labels = torch.randint(50, (32, 12)), torch.randint(5, (32,))
    inspector(Reader()).run_inspection(
        ids, target=labels, loss=F.cross_entropy, probes="position_effect"
    )
