"""A training in which nothing moves."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def test_training(inspector):
    """Fails: no weight changes from the first step on."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    inputs = torch.randn(256, 8)
    target = (inputs @ torch.randn(8, 3)).argmax(1)
    with inspector(model).monitor() as monitor:
        for step in range(60):
            chosen = torch.randint(256, (64,))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs[chosen]), target[chosen])
            loss.backward()
            optimizer.step()
            monitor.step_end(step, loss=loss)
    monitor.assert_healthy()
