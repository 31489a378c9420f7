"""A CNN trained on digits until some of its units died."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Digits(nn.Module):
    """Convolutions, one with a norm, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 4 * 4, 64)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.head(F.relu(self.fc1(x.flatten(1))))


def digits() -> tuple[Tensor, Tensor]:
    """Return images of shape (1797, 1, 8, 8) and their classes."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images / 16, dtype=torch.float32)[:, None], torch.tensor(data.target)


def trained() -> Digits:
    """Return the network after four passes with a high learning rate."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        images, classes = digits()
        model = Digits()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3, weight_decay=1e-3)
        for _ in range(4):
            for batch in torch.randperm(len(images)).split(64):
                optimizer.zero_grad()
                F.cross_entropy(model(images[batch]), classes[batch]).backward()
                optimizer.step()
        return model
