"""Models and batches that are the same in one process and on several ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, WIDTH, CLASSES = 6, 16, 4


class Net(nn.Module):
    """Two layers, a norm over features and a head, some units of which are dead."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        self.act = nn.ReLU()
        self.norm = nn.LayerNorm(width)
        self.second = nn.Linear(width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.act(self.first(x)))
        return self.head(F.gelu(self.second(hidden)))


def net(seed: int = 0, width: int = WIDTH) -> Net:
    """Return the model, the same for each seed; six units of the first layer are dead."""
    torch.manual_seed(seed)
    model = Net(width)
    with torch.no_grad():
        model.first.bias[:6] = -100.0
    return model


def batch(samples: int = 8, tokens: int = 4) -> tuple[Tensor, Tensor]:
    """Return inputs and classes of the whole batch."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, tokens, FEATURES, generator=generator)
    return x, torch.randint(0, CLASSES, (samples, tokens), generator=generator)


def share(whole: tuple[Tensor, Tensor], rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Return what one rank gets of a batch: every so many samples in a row."""
    x, y = (part.chunk(ranks)[rank] for part in whole)
    return x, y
