"""A term of the loss that is added when the gradients are there already."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Penalised(nn.Module):
    """A classifier with a second head, which says how far to trust the first."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 64), nn.ReLU())
        self.head, self.trust = nn.Linear(64, 3), nn.Linear(64, 1)

    def forward(self, inputs):
        features = self.body(inputs)
        return self.head(features), self.trust(features.detach())


def make_batch():
    """Return 64 samples and their labels."""
    torch.manual_seed(1)
    return torch.randn(64, 20), torch.randint(3, (64,))


def train_step(model, optimizer, batch):
    """Learn labels, and which of them are guessed rightly."""
    inputs, target = batch
    optimizer.zero_grad()
    scores, trust = model(inputs)
    loss = F.cross_entropy(scores, target)
    loss.backward()
    is_right = (scores.argmax(1) == target).float()
    # The fault: this term comes after the backward pass, and is in the log alone.
    loss = loss + F.binary_cross_entropy_with_logits(trust[:, 0], is_right)
    optimizer.step()
    return loss


def test_step(inspector):
    """Fails: the returned loss depends on ``trust``, which gets no gradient."""
    torch.manual_seed(0)
    model = Penalised()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inspector(model).run_step(train_step, optimizer, make_batch())
