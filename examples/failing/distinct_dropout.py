"""One seed for all ranks: the same units are dropped on each."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


@pytest.mark.modelhealth_ranks(2)
@pytest.mark.modelhealth(severity={"distinct_dropout": "fail"})  # it only warns by itself
def test_seeded(inspector, rank):
    """Fails: twice the ranks, and no more noise than with one."""
    samples = torch.randn(2, 64, 20, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)  # the fault: torch.manual_seed(seed + rank) once the model is made
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 5))
    )
    target = torch.randint(5, (64,))
    inspector(model).run_inspection(samples[rank], target, loss=F.cross_entropy)
