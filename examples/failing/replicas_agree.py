"""A dropout that parts the ranks of one tensor-parallel group."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class Net(nn.Module):
    """Features ``(N, 16)`` to 4 classes, its two large layers cut over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.1)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.up(self.drop(x)).relu()))


@pytest.mark.modelhealth_ranks(2)
def test_tensor_parallel(inspector, rank):
    """Fails: each rank drops other units of what should be one and the same tensor."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    model = parallelize_module(Net(), mesh, plan)
    inputs, target = torch.randn(64, 16), torch.randint(4, (64,))
    torch.manual_seed(1 + rank)  # the fault: right for data-parallel ranks, wrong within a group
    inspector(model).run_inspection(inputs, target, loss=F.cross_entropy)
