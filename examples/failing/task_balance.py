"""Two tasks of which only one is learnt: the size is in grams."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn


class TwoTasks(nn.Module):
    """The kind and the weight of an animal, from features ``(N, 20)``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.heads = nn.ModuleDict({"kind": nn.Linear(64, 3), "weight": nn.Linear(64, 1)})

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.body(x)
        return {task: head(features) for task, head in self.heads.items()}


@pytest.mark.modelhealth(max_task_ratio=100)
def test_two_tasks(inspector):
    """Fails: on the shared layers the weight's gradient drowns that of the kind."""
    torch.manual_seed(0)
    kilograms = 3 * torch.randn(256, 1)
    target = {"kind": torch.randint(3, (256,)), "weight": 1000 * kilograms}  # the fault
    inspector(TwoTasks()).run_inspection(
        torch.randn(256, 20),
        target,
        loss={
            "kind": lambda output, target: F.cross_entropy(output["kind"], target),
            "weight": lambda output, target: F.l1_loss(output["weight"], target) * 1e3,
        },
    )
