"""A multilayer perceptron for the digits."""

from __future__ import annotations

from torch import Tensor, nn


class MLP(nn.Module):
    """Two hidden layers with ReLU: ``(N, 1, 8, 8)`` to ``(N, 10)`` logits."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(64, 128)
        self.relu1 = nn.ReLU()
        self.fc2 = nn.Linear(128, 64)
        self.relu2 = nn.ReLU()
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.relu1(self.fc1(images.flatten(1)))
        x = self.relu2(self.fc2(x))
        return self.head(x)
