"""An encoder that should learn and is read under `no_grad`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Captioner(nn.Module):
    """Image features ``(N, 32)`` to 5 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64))
        self.head = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():  # the fault: left over from the time when the encoder was frozen
            features = self.encoder(x)
        return self.head(features)


def test_captioner(inspector):
    """Fails: moving the encoder's weights moves the loss, and no gradient says so."""
    torch.manual_seed(0)
    features, labels = torch.randn(128, 32), torch.randint(5, (128,))
    report = inspector(Captioner(), checks="parameter_effect").run_inspection(
        features, target=labels, loss=F.cross_entropy, probes="parameter_effect"
    )
    report.assert_healthy(inconclusive="fail")  # only an optimizer could say that it is meant so
