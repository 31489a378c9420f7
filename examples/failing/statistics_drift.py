"""Running statistics that one odd batch spoils for good."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def test_training(inspector):
    """Fails: the running variance is far from that of any usual batch."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32, momentum=0.01), nn.ReLU(), nn.Linear(32, 3)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    inputs = torch.randn(256, 8)
    target = (inputs @ torch.randn(8, 3)).argmax(1)
    with inspector(model).monitor() as monitor:
        for step in range(100):
            if step == 50:
                with torch.no_grad():
                    model(inputs * 1e4)  # the fault: raw data, for a picture, in training mode
            chosen = torch.randint(256, (64,))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs[chosen]), target[chosen])
            loss.backward()
            optimizer.step()
            monitor.step_end(step, loss=loss)
    monitor.assert_healthy()
