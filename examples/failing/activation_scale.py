"""A residual stream that grows with depth: each block hands on a multiple of what it took."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    """Eight residual blocks on features ``(N, 64)``, then one number."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)) for _ in range(10)
        )
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = 3 * x + block(x)  # the fault: a factor from an experiment, which was to go again
        return self.head(x)


def test_residual(inspector):
    """Fails: activations treble from block to block."""
    torch.manual_seed(0)
    features = torch.randn(128, 64)
    inspector(Residual()).run_inspection(
        features, target=features[:, :1] - features[:, 1:2], loss=F.mse_loss
    )
