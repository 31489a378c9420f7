"""A head outside of DDP, whose gradients nobody averages."""

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
        body = nn.Sequential(nn.Linear(20, 64), nn.ReLU())
        self.body = DistributedDataParallel(body)  # the fault: the head came later, and stayed out
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@pytest.mark.modelhealth_ranks(2)
def test_net(inspector, rank):
    """Fails: the head of each rank goes its own way."""
    torch.manual_seed(0)
    model = Net()
    torch.manual_seed(1 + rank)
    inputs, target = torch.randn(64, 20), torch.randint(5, (64,))
    inspector(model).run_inspection(inputs, target, loss=F.cross_entropy)
