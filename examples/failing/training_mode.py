"""A model that trains in evaluation mode from its second step on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def make_model():
    """Return a small classifier of 20 features."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 3))


def make_batch():
    """Return 64 samples and their labels."""
    torch.manual_seed(1)
    return torch.randn(64, 20), torch.randint(3, (64,))


def train_step(model, optimizer, batch):
    """Train, then measure."""
    inputs, target = batch
    optimizer.zero_grad()
    loss = F.cross_entropy(model(inputs), target)
    loss.backward()
    optimizer.step()
    model.eval()  # the fault: nobody calls model.train() again
    with torch.no_grad():
        model(inputs).argmax(1).eq(target).float().mean()
    return loss


def test_step(inspector):
    """Fails: in the second call the dropout drops nothing."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inspector(model).run_step(train_step, optimizer, make_batch())
