"""Ranks that take different branches, while DDP waits for both on each."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Forked(nn.Module):
    """Features ``(N, 20)`` to 5 classes, on one of two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.bright, self.dark = nn.Linear(20, 64), nn.Linear(20, 64)
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        # The fault: what a batch holds decides for all of it, and each rank has its own batch.
        way = self.bright if x.mean() > 0 else self.dark
        return self.head(way(x).relu())


@pytest.mark.modelhealth_ranks(2)
def test_forked(inspector, rank):
    """Fails: each rank leaves another branch without a gradient."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Forked())
    torch.manual_seed(1 + rank)
    inputs = torch.randn(64, 20) + (0.5 if rank else -0.5)
    inspector(model).run_inspection(inputs, torch.randint(5, (64,)), loss=F.cross_entropy)
