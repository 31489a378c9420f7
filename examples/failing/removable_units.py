"""Units that cost time and memory and do nothing: a layer far too wide."""

from __future__ import annotations

import pytest
import torch
from torch import nn


@pytest.mark.modelhealth(max_removable_fraction=0.1)
def test_pruned_network(inspector):
    """Fails: half of the units were pruned by masks, and are computed all the same."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
    with torch.no_grad():  # the fault: masks make weights zero, and layers no smaller
        model[0].weight[::2] = 0.0
        model[0].bias[::2] = 0.0
    batches = [torch.randn(64, 20) for _ in range(4)]
    inspector(model.eval()).removable(batches)
