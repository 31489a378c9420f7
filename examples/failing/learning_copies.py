"""A target network that learns by itself, where it should follow."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Agent(nn.Module):
    """The value of 4 actions in a state ``(N, 8)``."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        self.target = copy.deepcopy(self.online)

    def forward(self, state: Tensor) -> Tensor:
        return self.online(state)


def train_step(model, optimizer, batch):
    """Bring the value of a state near that of the next."""
    state, reward, after = batch
    optimizer.zero_grad()
    goal = reward + 0.9 * model.target(after).amax(1)  # the fault: no torch.no_grad()
    loss = F.mse_loss(model(state).amax(1), goal)
    loss.backward()
    optimizer.step()
    return loss


@pytest.mark.modelhealth(severity={"learning_copies": "fail"})  # it only warns by itself
def test_step(inspector):
    """Fails: the optimizer moves the target."""
    torch.manual_seed(0)
    model = Agent()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(64, 8), torch.randn(64), torch.randn(64, 8)
    inspector(model).run_step(train_step, optimizer, batch)
