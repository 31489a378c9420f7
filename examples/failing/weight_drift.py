"""Weights that grow without end before a normalisation, which hides it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn


@pytest.mark.modelhealth(severity={"weight_drift": "fail"})  # where the loss is well it only warns
def test_training(inspector):
    """Fails: the first layer grows by two orders of magnitude."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 3))
    # The fault: a rate of 5. The normalisation hides that the weights grow and grow.
    first = {"params": model[0].parameters(), "lr": 5.0}
    optimizer = torch.optim.Adam([first, {"params": model[1:].parameters()}], lr=1e-2)
    inputs = torch.randn(256, 8)
    target = (inputs @ torch.randn(8, 3)).argmax(1)
    with inspector(model).monitor() as monitor:
        for step in range(150):
            chosen = torch.randint(256, (64,))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs[chosen]), target[chosen])
            loss.backward()
            optimizer.step()
            monitor.step_end(step, loss=loss)
    monitor.assert_healthy()
