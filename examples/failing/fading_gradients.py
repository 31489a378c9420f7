"""A layer that is cut off half-way through a training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def test_training(inspector):
    """Fails: a layer gets no gradient any more, and is called all the while."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    inputs = torch.randn(256, 8)
    target = (inputs @ torch.randn(8, 3)).argmax(1)
    with inspector(model).monitor() as monitor:
        for step in range(150):
            chosen = torch.randint(256, (64,))
            optimizer.zero_grad()
            hidden = model[:2](inputs[chosen])
            if step >= 60:
                hidden = hidden.detach()  # the fault: a phase in which only the head should learn
            loss = F.cross_entropy(model[2:](hidden), target[chosen])
            loss.backward()
            optimizer.step()
            monitor.step_end(step, loss=loss)
    monitor.assert_healthy()
