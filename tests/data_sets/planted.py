"""Models and data with facts put into them, and healthy ones that look like these."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

CLASSES, UNITS, NOISE = 10, 16, 4
MISSING = 9
"""The class that the data has no sample of."""

ONE_UNIT = (5, 3)
"""A unit, and the one class that it never fires for."""

DEAD_CLASS = 7
"""The class that no unit fires for: its outputs are all the same."""

REPEATED_CLASS = 4
"""A class whose samples are all the same, so that their outputs rightly are."""

DEAD_UNIT = 11
"""A unit that fires for no class: no matter of classes."""

RARE = (13, 2)
"""A unit that fires for one sample of a class only: it fires."""


def labelled(samples: int = 600) -> tuple[Tensor, Tensor]:
    """Return inputs, a one-hot class beside noise, and labels; one class is missing."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, MISSING, (samples,), generator=generator)
    noise = torch.rand(samples, NOISE, generator=generator) + 0.1
    noise[labels == REPEATED_CLASS] = 0.5
    rare = int((labels == RARE[1]).nonzero()[17])
    flags = torch.zeros(samples, 1)
    flags[rare] = 1.0
    return torch.cat([nn.functional.one_hot(labels, CLASSES), noise, flags], dim=1).float(), labels


class Planted(nn.Module):
    """Two linear maps with a ReLU between, with the facts above in the first one's weights."""

    def __init__(self, activation: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.fc = nn.Linear(CLASSES + NOISE + 1, UNITS)
        self.act = activation or nn.ReLU()
        self.head = nn.Linear(UNITS, CLASSES)
        with torch.no_grad():
            weight = self.fc.weight
            weight.zero_()
            self.fc.bias.fill_(0.01)
            weight[:, CLASSES : CLASSES + NOISE] = torch.rand(UNITS, NOISE) + 0.1
            weight[ONE_UNIT[0], ONE_UNIT[1]] = -100.0
            weight[:, DEAD_CLASS] = -100.0
            self.fc.bias[DEAD_UNIT] = -100.0
            weight[RARE[0], RARE[1]] = -100.0
            weight[RARE[0], -1] = 200.0

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, ``(N, 10)``."""
        return self.head(self.act(self.fc(x)))


def healthy(activation: nn.Module | None = None) -> Planted:
    """Return the same model as torch initialises it."""
    model = Planted(activation)
    torch.manual_seed(2)
    model.fc.reset_parameters()
    return model


def batches(inputs: Tensor, labels: Tensor, size: int = 64) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs; the last one is smaller."""
    yield from zip(inputs.split(size), labels.split(size), strict=True)
