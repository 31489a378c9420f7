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
        del placed
        return self.head(self.block(words).mean(1))  # the fault: not of `placed`


def test_classifier(inspector):
    """Fails: the same batch is predicted otherwise each time, in evaluation mode."""
    torch.manual_seed(0)
    features, labels = torch.randn(128, 20), torch.randint(5, (128,))
    inspector(Classifier()).run_inspection(
        features, target=labels, loss=F.cross_entropy, probes="repeatability"
    )
