"""Missing gradients: a branch that is computed, used and never trained."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ReviewScorer(nn.Module):
    """Scores ``(N,)`` from a review's text ``(N, 64)`` and its author's history ``(N, 16)``."""

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder = nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 32))
        self.author_encoder = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32))
        self.head = nn.Linear(64, 1)

    def forward(self, text: Tensor, author: Tensor) -> Tensor:
        # The refactor: authors were given a cache, for which their code was detached. The cache
        # is gone again; the detach() stayed, and so author_encoder keeps its initial weights.
        author_code = self.author_encoder(author).detach()
        features = torch.cat([self.text_encoder(text), author_code], dim=1)
        return self.head(features).squeeze(1)


def test_review_scorer(inspector):
    """Fails: ``author_encoder.2`` is the last layer before the cut."""
    torch.manual_seed(0)
    text, author = torch.randn(256, 64), torch.randn(256, 16)
    inspector(ReviewScorer()).run_inspection(
        (text, author), target=text[:, 0] + author[:, 0], loss=F.mse_loss
    )
