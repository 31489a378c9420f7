"""A convolutional network for the digits."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class CNN(nn.Module):
    """Two convolutions with BatchNorm and `F.relu`: ``(N, 1, 8, 8)`` to ``(N, 10)`` logits."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(32)
        self.pool = nn.MaxPool2d(2)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(32 * 2 * 2, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm1(self.conv1(images))))
        x = self.pool(F.relu(self.norm2(self.conv2(x))))
        return self.head(self.dropout(x.flatten(1)))
