"""Steps as large as the weights that they change."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn


@pytest.mark.modelhealth(severity={"update_ratio": "fail"})  # where the loss is well it only warns
def test_training(inspector):
    """Fails: each step changes the weights by a tenth of them and more."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 3))
    # The fault: a decay that leaves weights no size of their own, and a rate that replaces them.
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=2.0)
    inputs = torch.randn(256, 8)
    target = (inputs @ torch.randn(8, 3)).argmax(1)
    with inspector(model).monitor() as monitor:
        for step in range(80):
            chosen = torch.randint(256, (64,))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs[chosen]), target[chosen])
            loss.backward()
            optimizer.step()
            monitor.step_end(step, loss=loss)
    monitor.assert_healthy()
