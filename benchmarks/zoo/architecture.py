"""What the zoo holds: a model as its library ships it, with a batch made for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from corpus.subject import Subject

CLASSES = 10
BATCH = 8


@dataclass(frozen=True)
class Architecture:
    """A model of somebody else's.

    Args:
        family: the library and the kind, a row of the table.
        name: what its library calls it.
        build: makes the model, untrained and in training mode, and a batch for it, under the
            current random seed; raises whatever the library does where that is impossible.
        loss_modes: the modes in which the loss takes what the model returns; in others none is
            given.
    """

    family: str
    name: str
    build: Callable[[], Subject]
    loss_modes: tuple[str, ...] = ("train", "eval")


class NotBuiltError(Exception):
    """The library's defaults, shrunk, make no model, or none that takes the batch."""


def images(side: int, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    """Return normalised square images, [batch, 3, side, side], and their classes, [batch]."""
    return torch.randn(batch, 3, side, side), torch.randint(0, CLASSES, (batch,))
