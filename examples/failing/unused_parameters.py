"""A layer that is made and never called, on which DDP waits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Net(nn.Module):
    """Features ``(N, 20)`` to 5 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 64), nn.ReLU())
        self.head = nn.Linear(64, 5)
        self.old_head = nn.Linear(64, 10)  # the fault: still made, no longer called

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@pytest.mark.modelhealth_ranks(2)
def test_net(inspector, rank):
    """Fails: no rank gives ``old_head`` a gradient, so that the second step of DDP would raise."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    torch.manual_seed(1 + rank)
    inputs, target = torch.randn(64, 20), torch.randint(5, (64,))
    inspector(model).run_inspection(inputs, target, loss=F.cross_entropy)
