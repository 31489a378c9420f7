"""A model that is to run in float16, and whose values do not fit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Retriever(nn.Module):
    """Scores 16 queries ``(N, 64)`` against 100 documents."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(64, 256)
        self.documents = nn.Parameter(torch.randn(100, 256))

    def forward(self, queries: Tensor) -> Tensor:
        # The fault: scores are divided by the temperature before the softmax takes out the
        # largest, and 0.0005 was found in float32.
        return F.log_softmax(self.query(queries) @ self.documents.T / 5e-4, dim=-1)


@pytest.mark.modelhealth(planned_dtype="float16")
def test_retriever(inspector):
    """Fails: in float16, whose largest number is 65504, the scores would be infinite."""
    torch.manual_seed(0)
    queries, found = torch.randn(64, 64), torch.randint(100, (64,))
    inspector(Retriever(), skip_checks=["saturation"]).run_inspection(
        queries, target=found, loss=F.nll_loss
    )
