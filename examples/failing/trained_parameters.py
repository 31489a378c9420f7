"""An optimizer that holds only a part of the model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def make_model():
    """Return a small classifier of 20 features."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 3))


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
    """Fails: the first layer gets a gradient and never moves."""
    model = make_model()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)  # the fault: the head alone
    inspector(model).run_step(train_step, optimizer, make_batch())
