"""A state that keeps the graph of the step before."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Carrying(nn.Module):
    """Scores that also depend on the mean score of the batch before."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
        self.last = torch.zeros(3)

    def forward(self, inputs):
        scores = self.body(inputs) + 0.1 * self.last
        self.last = scores.mean(0)  # the fault: no .detach()
        return scores


def make_batch():
    """Return 64 samples and their labels."""
    torch.manual_seed(1)
    return torch.randn(64, 20), torch.randint(3, (64,))


def train_step(model, optimizer, batch):
    """Do the usual."""
    inputs, target = batch
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), target)
    loss.backward()
    optimizer.step()
    return loss


def test_step(inspector):
    """Fails: the second call goes back through the graph of the first, which is gone."""
    torch.manual_seed(0)
    model = Carrying()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inspector(model).run_step(train_step, optimizer, make_batch())
