"""One prediction for all: a mean over the wrong dimension."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SetClassifier(nn.Module):
    """Sets of 10 points ``(N, 10, 8)`` to 5 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32))
        self.head = nn.Linear(32, 5)

    def forward(self, points: Tensor) -> Tensor:
        points = self.point(points)
        # The fault: what is left are points of the mean set, where sets of the mean point were
        # meant; it is spread over the batch again, since the loss complained of shapes.
        pooled = points.mean(dim=(0, 1), keepdim=True).expand(points.shape[0], -1, -1)
        return self.head(pooled).squeeze(1)


def test_set_classifier(inspector):
    """Fails: the output is the same for each sample of the batch."""
    torch.manual_seed(0)
    points, labels = torch.randn(128, 10, 8), torch.randint(5, (128,))
    inspector(SetClassifier()).run_inspection(points, target=labels, loss=F.cross_entropy)
