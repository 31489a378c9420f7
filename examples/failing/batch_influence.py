"""Half of the batch goes nowhere."""

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
    """Take the first of two micro-batches."""
    inputs, target = batch
    optimizer.zero_grad()
    for _ in range(0, len(inputs), 32):
        loss = F.cross_entropy(model(inputs[:32]), target[:32])  # the fault: always these
        (loss / 2).backward()
    optimizer.step()
    return loss


def test_step(inspector):
    """Fails: the second half changes nothing."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inspector(model).run_step(train_step, optimizer, make_batch())
