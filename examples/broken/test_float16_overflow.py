"""Overflow in float16: a logarithm of a sum of exponentials, written out."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SmoothMaximum(nn.Module):
    """Pools each channel by log-mean-exp: ``(N, C, H, W)`` to ``(N, C)``."""

    sharpness = 16.0

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.sharpness * x
        # The refactor: this was torch.logsumexp, which takes the maximum out first. exp(11.1) is
        # more than 65504, the largest float16.
        total = scaled.exp().sum(dim=(2, 3)).log()
        return (total - math.log(x.shape[2] * x.shape[3])) / self.sharpness


class HalfPrecisionDetector(nn.Module):
    """Names what is somewhere in float16 images ``(N, 1, 32, 32)``: logits ``(N, 5)``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.relu = nn.ReLU()
        self.pool = SmoothMaximum()
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.pool(self.relu(self.conv(images))))


def test_half_precision_detector(inspector):
    """Fails: ``pool`` gives infinities; each layer before it is finite."""
    torch.manual_seed(0)
    images = torch.randn(32, 1, 32, 32).half()
    classes = torch.randint(5, (32,))
    inspector(HalfPrecisionDetector().half()).run_inspection(
        images, target=classes, loss=F.cross_entropy
    )
