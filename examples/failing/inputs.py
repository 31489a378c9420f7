"""Raw pixels: a transform that was lost, so that images come in 0 to 255."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def test_photo_classifier(inspector):
    """Fails: the first convolution is given numbers a hundred times too large."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    )
    photos = torch.randint(256, (64, 3, 32, 32)).float()  # the fault: never divided by 255
    labels = torch.randint(10, (64,))
    inspector(model).run_inspection(photos, target=labels, loss=F.cross_entropy)
