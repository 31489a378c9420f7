"""An input that nothing depends on, though the forward computes with it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Recommender(nn.Module):
    """Scores of 5 offers from a customer's features ``(N, 20)`` and the hour ``(N, 1)``."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.clock = nn.Linear(20, 64), nn.Linear(1, 64)
        self.head = nn.Linear(64, 5)

    def forward(self, customer: Tensor, hour: Tensor) -> Tensor:
        # The fault: a softmax over one number is 1, whatever the number is.
        share = hour.softmax(-1)
        return self.head((self.body(customer) + self.clock(share)).relu())


def test_recommender(inspector):
    """Fails: the probe notes that the hour has no effect, and the test asks for its notes."""
    torch.manual_seed(0)
    batch = {"customer": torch.randn(128, 20), "hour": torch.randn(128, 1)}
    labels = torch.randint(5, (128,))
    report = inspector(Recommender()).run_inspection(
        batch, target=labels, loss=F.cross_entropy, probes="input_effect"
    )
    notes = report.observation.probes["input_effect"].notes
    assert not notes
