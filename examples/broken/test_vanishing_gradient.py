"""A vanishing gradient: a deep network whose ReLUs became sigmoids."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DeepRegressor(nn.Module):
    """Sixteen hidden layers: ``(N, 16)`` to ``(N, 1)``, the outputs of each in [0, 1]."""

    def __init__(self) -> None:
        super().__init__()
        widths = [16] + [32] * 16
        self.hidden = nn.ModuleList(nn.Linear(n_in, n_out) for n_in, n_out in pairwise(widths))
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.hidden:
            # The refactor: F.relu became a sigmoid, to bound what each layer passes on. Its slope
            # is at most 1/4, and sixteen of them in a row let next to no gradient through.
            x = torch.sigmoid(linear(x))
        return self.head(x)


def test_deep_regressor(inspector):
    """Fails: next to nothing of the gradient arrives at ``hidden.0``."""
    torch.manual_seed(0)
    x = torch.randn(256, 16)
    inspector(DeepRegressor()).run_inspection(x, target=x.sum(dim=1, keepdim=True), loss=F.mse_loss)
