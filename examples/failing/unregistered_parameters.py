"""Layers in a plain list, of which neither the optimizer nor `model.to` knows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Ensemble(nn.Module):
    """The mean of three heads on features ``(N, 20)``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 64), nn.ReLU())
        self.heads = [nn.Linear(64, 5) for _ in range(3)]  # the fault: no nn.ModuleList

    def forward(self, x: Tensor) -> Tensor:
        features = self.body(x)
        return torch.stack([head(features) for head in self.heads]).mean(0)


def test_ensemble(inspector):
    """Fails: the heads get gradients, and are not among ``model.parameters()``."""
    torch.manual_seed(0)
    features, labels = torch.randn(128, 20), torch.randint(5, (128,))
    inspector(Ensemble()).run_inspection(features, target=labels, loss=F.cross_entropy)
