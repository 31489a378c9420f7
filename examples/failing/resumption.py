"""A state that is not saved, so that a resumed training goes another way."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Averaging(nn.Module):
    """A classifier that centres its inputs by their mean so far."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))
        # The fault: persistent=False keeps the mean out of the state_dict.
        self.register_buffer("mean", torch.zeros(20), persistent=False)

    def forward(self, inputs):
        self.mean.mul_(0.9).add_(0.1 * inputs.detach().mean(0))
        return self.body(inputs - self.mean)


def make_batch():
    """Return 64 samples and their labels."""
    torch.manual_seed(1)
    return torch.randn(64, 20) + 1, torch.randint(3, (64,))


def train_step(model, optimizer, batch):
    """Do the usual."""
    inputs, target = batch
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), target)
    loss.backward()
    optimizer.step()
    return loss


def test_step(inspector):
    """Fails: after loading what was saved the next step is another one."""
    torch.manual_seed(0)
    model = Averaging()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inspector(model).run_step(train_step, optimizer, make_batch(), resume=True)
