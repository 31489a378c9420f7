"""A temperature that falls without end: codes become signs, and stop learning."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Hashing(nn.Module):
    """Classes of features ``(N, 8)`` by a code that is to become binary."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0
        self.code, self.sign, self.head = nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.sign(self.code(x) / self.temperature))


@pytest.mark.modelhealth(severity={"saturating_layers": "fail"})  # where the loss is well it warns
def test_training(inspector):
    """Fails: the tanh gives -1 and 1 and nothing between, and passes no gradient."""
    torch.manual_seed(0)
    model = Hashing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(256, 8)
    target = (inputs @ torch.randn(8, 3)).argmax(1)
    with inspector(model).monitor() as monitor:
        for step in range(120):
            chosen = torch.randint(256, (64,))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs[chosen]), target[chosen])
            loss.backward()
            optimizer.step()
            model.temperature *= 0.9  # the fault: no floor
            monitor.step_end(step, loss=loss)
    monitor.assert_healthy()
