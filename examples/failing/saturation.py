"""A gate that is open or shut, and nothing between: its sigmoid lies at its ends."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Gated(nn.Module):
    """Features ``(N, 32)``, of which a gate lets some through, to 5 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate = nn.Linear(32, 64), nn.Linear(32, 64)
        self.open = nn.Sigmoid()
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        # The fault: a temperature of 1/100 where 1 was meant. At its ends a sigmoid is flat, so
        # that the gate never learns when to open.
        return self.head(self.value(x) * self.open(self.gate(x) / 0.01))


def test_gated(inspector):
    """Fails: nearly all of ``open`` is 0 or 1."""
    torch.manual_seed(0)
    features, labels = torch.randn(256, 32), torch.randint(5, (256,))
    inspector(Gated()).run_inspection(features, target=labels, loss=F.cross_entropy)
