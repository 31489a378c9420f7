"""Ranks that go on from other weights: one of them read the checkpoint."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def make_model():
    """Return a classifier of 20 features."""
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))


@pytest.mark.modelhealth_ranks(2)
def test_resumed(inspector, rank):
    """Fails: rank 0 has the weights of the checkpoint, rank 1 those that it began with."""
    torch.manual_seed(0)
    checkpoint = make_model().state_dict()
    model = DistributedDataParallel(make_model())
    if rank == 0:  # the fault: right for writing; and DDP made weights equal before, not now
        model.module.load_state_dict(checkpoint)
    torch.manual_seed(1 + rank)
    inputs, target = torch.randn(64, 20), torch.randint(5, (64,))
    inspector(model).run_inspection(inputs, target, loss=F.cross_entropy)
