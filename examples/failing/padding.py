"""A mean that counts the padding, too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Reader(nn.Module):
    """Padded sentences ``(N, T)`` of 50 words to 5 topics."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.mix = nn.Sequential(nn.Linear(32, 32), nn.GELU())
        self.head = nn.Linear(32, 5)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        # The fault: the mask is there and nothing uses it. A sentence means something else in a
        # batch that holds a longer one.
        return self.head(self.mix(self.words(ids)).mean(1))


def test_reader(inspector):
    """Fails: what stands in the padding changes the prediction."""
    torch.manual_seed(0)
    mask = torch.arange(12) < torch.randint(4, 13, (64,))[:, None]
    ids = torch.randint(1, 50, (64, 12)) * mask
    topics = torch.randint(5, (64,))
    inspector(Reader()).run_inspection(
        {"ids": ids, "mask": mask.long()}, target=topics, loss=F.cross_entropy, probes="padding"
    )
