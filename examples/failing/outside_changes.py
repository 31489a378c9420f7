"""Weights that something else than the optimizer writes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn


@pytest.mark.modelhealth(severity={"outside_changes": "fail"})  # it only warns by itself
def test_training(inspector):
    """Fails: the weights change between two steps."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    inputs = torch.randn(256, 8)
    target = (inputs @ torch.randn(8, 3)).argmax(1)
    with inspector(model).monitor() as monitor:
        for step in range(80):
            if step == 50:
                model[2].reset_parameters()  # the fault: meant for a new run, called in this one
            chosen = torch.randint(256, (64,))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs[chosen]), target[chosen])
            loss.backward()
            optimizer.step()
            monitor.step_end(step, loss=loss)
    monitor.assert_healthy()
