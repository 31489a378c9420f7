"""Statistics of batches that are never kept: a momentum of 0."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def test_after_training(inspector):
    """Fails: in evaluation mode the mean and variance are still those that it began with."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, 64),
        # The fault: other frameworks call 0.99 momentum what is 0.01 here, and somebody who knew
        # half of it wrote 0, for "no momentum".
        nn.BatchNorm1d(64, momentum=0.0),
        nn.ReLU(),
        nn.Linear(64, 3),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    features, labels = torch.randn(256, 20), torch.randint(3, (256,))
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(model(features), labels).backward()
        optimizer.step()
    inspector(model.eval()).run_inspection(features, target=labels, loss=F.cross_entropy)
