"""An exploding gradient: weights drawn without regard to the width of the layer."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DeepClassifier(nn.Module):
    """Eight hidden layers of 128 units: ``(N, 64)`` to logits ``(N, 10)``."""

    def __init__(self) -> None:
        super().__init__()
        widths = [64] + [128] * 8
        self.hidden = nn.ModuleList(nn.Linear(n_in, n_out) for n_in, n_out in pairwise(widths))
        self.head = nn.Linear(128, 10)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for linear in self.hidden:
            # The refactor: this was nn.init.kaiming_normal_(linear.weight). normal_ draws with a
            # standard deviation of 1 instead of sqrt(2/128), so each layer multiplies by 8.
            nn.init.normal_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.hidden:
            x = F.relu(linear(x))
        return self.head(x)


@pytest.mark.modelhealth(max_grad_norm=100.0)
def test_deep_classifier(inspector):
    """Fails: ``hidden.0`` starts eight times too large; the gradients that explode follow."""
    torch.manual_seed(0)
    labels = torch.randint(10, (256,))
    inspector(DeepClassifier()).run_inspection(
        torch.randn(256, 64), target=labels, loss=F.cross_entropy
    )
