"""Samples that see each other: features centred along the wrong dimension."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Centred(nn.Module):
    """Scores ``(N, 10)`` of features ``(N, 64)``."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        features = self.encoder(x)
        # The refactor: dimension 0 is that of samples, so each is held against the rest of its
        # batch. The loss falls all the same, and a single sample is always predicted alike.
        features = features - features.mean(0, keepdim=True)
        return self.head(features)


def test_centred_features(inspector):
    """Fails: what is predicted for a sample depends on the others of its batch."""
    torch.manual_seed(0)
    features, labels = torch.randn(64, 64), torch.randint(10, (64,))
    inspector(Centred()).run_inspection(
        features, target=labels, loss=F.cross_entropy, probes="sample_independence"
    )
