"""Overflow in float16: an average over an image became a sum."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class SumPool(nn.Module):
    """Adds up each channel: ``(N, C, H, W)`` to ``(N, C)``."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(dim=(2, 3))


class HalfPrecisionCounter(nn.Module):
    """Counts objects in float16 images ``(N, 1, 64, 64)``: logits ``(N, 5)``."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, padding=1)
        self.relu = nn.ReLU()
        # The refactor: this was nn.AdaptiveAvgPool2d(1). A count should add up, but 4096 pixels of
        # up to 255 add up to more than 65504, the largest float16.
        self.pool = SumPool()
        self.head = nn.Linear(16, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.pool(self.relu(self.conv(images))))


def test_half_precision_counter(inspector):
    """Fails: ``pool`` gives infinities; each layer before it is finite."""
    torch.manual_seed(0)
    images = torch.randint(256, (32, 1, 64, 64)).half()
    counts = torch.randint(5, (32,))
    inspector(HalfPrecisionCounter().half()).run_inspection(
        images, target=counts, loss=F.cross_entropy
    )
