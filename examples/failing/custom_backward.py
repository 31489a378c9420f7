"""A backward pass written by hand that forgets a term."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Swish(torch.autograd.Function):
    """``x * sigmoid(x)``, which keeps its input alone for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return -gradient * (s + x * s * (1 - s))  # the fault: a sign


class Classifier(nn.Module):
    """Features ``(N, 20)`` to 5 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(20, 64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(Swish.apply(self.body(x)))


def test_classifier(inspector):
    """Fails: what ``backward`` returns is not the slope of ``forward``."""
    torch.manual_seed(0)
    features, labels = torch.randn(128, 20), torch.randint(5, (128,))
    inspector(Classifier()).run_inspection(
        features, target=labels, loss=F.cross_entropy, probes="custom_backward"
    )
