"""Weights that grow until everything explodes, behind a tanh that hides it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def test_training(inspector):
    """Fails: what the first layer makes grows by orders of magnitude."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    inputs = torch.randn(256, 8)
    target = (inputs @ torch.randn(8, 3)).argmax(1)
    with inspector(model).monitor() as monitor:
        for step in range(150):
            if step >= 50:
                model[0].weight.data.mul_(1.1)  # the fault: the wrong sign of a weight decay
            chosen = torch.randint(256, (64,))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs[chosen]), target[chosen])
            loss.backward()
            optimizer.step()
            monitor.step_end(step, loss=loss)
    monitor.assert_healthy()
