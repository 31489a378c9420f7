"""A learning rate that a schedule makes too large."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def test_training(inspector):
    """Fails: what was learnt is lost again."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    inputs = torch.randn(256, 8)
    target = (inputs @ torch.randn(8, 3)).argmax(1)
    with inspector(model).monitor() as monitor:
        for step in range(150):
            if step == 80:
                optimizer.param_groups[0]["lr"] = 1.0  # the fault: a warm restart, far too warm
            chosen = torch.randint(256, (64,))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs[chosen]), target[chosen])
            loss.backward()
            optimizer.step()
            monitor.step_end(step, loss=loss)
    monitor.assert_healthy()
