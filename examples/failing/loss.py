"""A softmax twice: probabilities go into a loss that makes them itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Classifier(nn.Module):
    """Features ``(N, 20)`` to 5 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 64), nn.ReLU())
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        # The fault: cross_entropy takes logits. Of probabilities its gradient is small, and a
        # sample that is wrong for sure gets next to none.
        return self.head(self.body(x)).softmax(-1)


def test_classifier(inspector):
    """Fails: the loss is given probabilities."""
    torch.manual_seed(0)
    features, labels = torch.randn(128, 20), torch.randint(5, (128,))
    inspector(Classifier()).run_inspection(features, target=labels, loss=F.cross_entropy)
