"""Words that weigh more on one rank than on another: each takes its own mean."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class Tagger(nn.Module):
    """Scores ``(N, 9, T)`` of 9 tags for words ``(N, T)``."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(50, 32), nn.Linear(32, 9)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids).tanh()).transpose(1, 2)


@pytest.mark.modelhealth_ranks(2)
def test_tagger(inspector, rank):
    """Fails: a word of the rank with short sentences weighs three times as much."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Tagger())
    torch.manual_seed(1 + rank)
    ids, tags = torch.randint(50, (32, 12)), torch.randint(9, (32, 12))
    tags[:, 12 - 8 * rank :] = -100  # padding, of which the second rank has much
    # The fault: DDP averages the means of the ranks, of which each has its own denominator.
    inspector(model).run_inspection(ids, tags, loss=F.cross_entropy)
