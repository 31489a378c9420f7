"""A dead ReLU: a bias meant for the output went to every layer."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RareEventClassifier(nn.Module):
    """Log-odds ``(N,)`` of an event that one sample in 20000 shows."""

    def __init__(self, prior: float = 5e-5) -> None:
        super().__init__()
        self.fc1 = nn.Linear(32, 64)
        self.act1 = nn.ReLU()
        self.fc2 = nn.Linear(64, 64)
        self.act2 = nn.ReLU()
        self.head = nn.Linear(64, 1)
        self.prior = prior
        # The refactor: this was `self._init(self.head)`. A bias of -10 makes the output start at
        # the prior (Lin et al. 2017); in a hidden layer it keeps every unit below zero for good.
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.bias, -math.log((1 - self.prior) / self.prior))

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.fc1(x))
        x = self.act2(self.fc2(x))
        return self.head(x).squeeze(1)


def test_rare_event_classifier(inspector):
    """Fails: no unit of ``act1`` ever fires."""
    torch.manual_seed(0)
    events = torch.randint(2, (256,)).float()
    inspector(RareEventClassifier()).run_inspection(
        torch.randn(256, 32), target=events, loss=F.binary_cross_entropy_with_logits
    )
