"""Batch norms that see four samples each."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@pytest.mark.modelhealth_ranks(2)
@pytest.mark.modelhealth(severity={"synced_norm": "fail"})  # it only warns by itself
def test_small_batches(inspector, rank):
    """Fails: a batch of 8 became two of 4, and so did what the norm normalises by."""
    torch.manual_seed(0)
    # The fault: no nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 5))
    )
    torch.manual_seed(1 + rank)
    inputs, target = torch.randn(4, 20), torch.randint(5, (4,))
    inspector(model).run_inspection(inputs, target, loss=F.cross_entropy)
