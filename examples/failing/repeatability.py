"""A dropout that never ends: the function does not know the mode of the model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Classifier(nn.Module):
    """Features ``(N, 20)`` to 5 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(20, 64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.dropout(self.body(x).relu(), 0.3)  # the fault: no training=self.training
        return self.head(hidden)


def test_classifier(inspector):
    """Fails: the same batch is predicted otherwise each time, in evaluation mode."""
    torch.manual_seed(0)
    features, labels = torch.randn(128, 20), torch.randint(5, (128,))
    inspector(Classifier()).run_inspection(
        features, target=labels, loss=F.cross_entropy, probes="repeatability"
    )
