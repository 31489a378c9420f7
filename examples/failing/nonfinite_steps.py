"""A NaN that reaches the weights in the middle of a training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def test_training(inspector):
    """Fails: from one step on nothing is a number any more."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    inputs = torch.randn(256, 8)
    target = (inputs @ torch.randn(8, 3)).argmax(1)
    with inspector(model).monitor() as monitor:
        for step in range(60):
            chosen = torch.randint(256, (64,))
            batch = inputs[chosen]
            if step == 40:
                batch = batch / torch.zeros(1)  # the fault: a deviation that once was zero
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch), target[chosen])
            loss.backward()
            optimizer.step()
            monitor.step_end(step, loss=loss)
    monitor.assert_healthy()
