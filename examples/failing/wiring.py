"""One block called four times, and three that are never called."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """Four residual blocks on features ``(N, 32)``."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(4)
        )
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in self.blocks:
            x = x + self.blocks[0](x)  # the fault: the loop does not use what it goes through
        return self.head(x)


def test_residual(inspector):
    """Fails: ``blocks.0`` is called in the place of its siblings."""
    torch.manual_seed(0)
    features, labels = torch.randn(128, 32), torch.randint(5, (128,))
    inspector(Residual()).run_inspection(features, target=labels, loss=F.cross_entropy)
