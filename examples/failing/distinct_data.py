"""Each rank trains on the same samples: the `DistributedSampler` was forgotten."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@pytest.mark.modelhealth_ranks(2)
def test_loader(inspector, rank):
    """Fails: both ranks got the same batch."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)))
    data = torch.utils.data.TensorDataset(torch.randn(256, 20), torch.randint(5, (256,)))
    loader = torch.utils.data.DataLoader(data, batch_size=64)  # the fault: no sampler=
    inputs, target = next(iter(loader))
    inspector(model).run_inspection(inputs, target, loss=F.cross_entropy)
