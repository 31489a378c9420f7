"""A log-likelihood that is made small."""

from __future__ import annotations

import torch
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
    """Descend what should be climbed."""
    inputs, target = batch
    optimizer.zero_grad()
    scores = model(inputs).log_softmax(-1)
    likelihood = scores.gather(1, target[:, None]).mean()
    likelihood.backward()  # the fault: its minus
    optimizer.step()
    return likelihood


def test_step(inspector):
    """Fails: what cannot be positive goes down for ever."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inspector(model).run_step(train_step, optimizer, make_batch())
