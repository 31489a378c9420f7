"""Models whose costs are counted: convolutions, attention as matrix products, recurrences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    """Convolutions, functional layers, a residual, a frozen layer, one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.head = nn.Linear(8, 4).requires_grad_(False)
        self.never = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        x = x + self.conv(x)
        return self.head(x.mean((2, 3))) @ torch.ones(4, 2)


def bert() -> tuple[nn.Module, Tensor]:
    """A small BERT whose attention is matrix products that torch's counter knows."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        attn_implementation="eager",
    )
    return BertModel(config), torch.randint(0, 100, (2, 9))


def net() -> tuple[nn.Module, Tensor]:
    """The network above, and a batch."""
    return Net(), torch.randn(4, 3, 16, 16)


def lstm() -> tuple[nn.Module, Tensor]:
    """Two layers in both directions."""
    return nn.LSTM(12, 20, 2, bidirectional=True), torch.randn(7, 3, 12)


class Block(nn.Module):
    """Normalisation, a functional activation, a residual and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * torch.relu(self.conv(self.norm(x)))


def residual(layers: int = 3) -> nn.Module:
    """Return a small convolutional classifier."""
    torch.manual_seed(0)
    blocks = [Block() for _ in range(layers)]
    return nn.Sequential(nn.Conv2d(3, 4, 3), *blocks, nn.Flatten(), nn.Linear(4 * 36, 5))
