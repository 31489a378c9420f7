"""Images that look alike to the model, and go on looking alike: an average too many."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DocumentClassifier(nn.Module):
    """Long documents ``(N, 1024)`` of 50 words to 5 topics."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 32)
        self.topic = nn.Parameter(torch.randn(32))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 5)

    def forward(self, documents: Tensor) -> Tensor:
        # The fault: the sum over words was divided by their number twice, so that next to the
        # shared vector nothing of the document is left.
        words = self.words(documents).sum(1) / documents.shape[1] ** 2
        return self.head(self.norm(self.topic + words))


def test_document_classifier(inspector):
    """Fails: documents differ by a trace, before training and after the first steps of it."""
    torch.manual_seed(0)
    documents, topics = torch.randint(50, (64, 1024)), torch.randint(5, (64,))
    inspector(DocumentClassifier()).run_inspection(documents, target=topics, loss=F.cross_entropy)
