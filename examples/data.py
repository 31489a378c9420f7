"""Real data that is already on disk: scikit-learn's digits and the text of Python's own help."""

from __future__ import annotations

from collections.abc import Iterator
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from torch import Tensor

VOCABULARY = 128
"""The tokens of `read_text` are ASCII codes."""


class Digits(NamedTuple):
    """Handwritten digits: float32 images in [0, 1], ``(N, 1, 8, 8)``; int64 labels, ``(N,)``."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def read_digits() -> Digits:
    """Return the 1797 digits, shuffled with a fixed seed; the last 360 are held out."""
    from sklearn.datasets import load_digits  # takes a second, and not every example reads digits

    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float().unsqueeze(1) / 16  # a pixel counts 0 to 16
    labels = torch.from_numpy(bunch.target).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:-360], order[-360:]
    return Digits(images[train], labels[train], images[test], labels[test])


def read_text() -> Tensor:
    """Return Python's help topics as int64 tokens, shape ``(N,)``, N about half a million."""
    text = "\n".join(topics[name] for name in sorted(topics))
    return encode(text)


def encode(text: str) -> Tensor:
    """Return `text` as int64 tokens below `VOCABULARY`; other characters become question marks."""
    return torch.tensor(list(text.encode("ascii", errors="replace")))


def shuffled_batches(
    inputs: Tensor, targets: Tensor, epochs: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of 64, in a new order each epoch, the same on each run."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for chosen in torch.randperm(len(inputs), generator=generator).split(64):
            yield inputs[chosen], targets[chosen]


def text_batches(tokens: Tensor, length: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield windows of `tokens` and the same windows one token later, both ``(32, length)``."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - length, (32, 1), generator=generator)
        windows = tokens[starts + torch.arange(length + 1)]
        yield windows[:, :-1], windows[:, 1:]
