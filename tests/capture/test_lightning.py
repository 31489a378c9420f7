"""A `LightningModule` is inspected by its forward, or in a module around its training step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth import Inputs, Inspector

BATCH = torch.linspace(-1, 1, 64).reshape(16, 4).sin(), torch.arange(16) % 2


@pytest.fixture
def made():
    """Makes modules with methods of their own."""
    base = pytest.importorskip("lightning.pytorch").LightningModule

    class Classifier(base):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

    return lambda **methods: type("Classifier", (Classifier,), methods)()


def test_with_a_loss_inputs_go_into_the_forward(made):
    """The training step is not called."""
    module = made(training_step=lambda *_: 1 / 0)
    report = Inspector(module).run_inspection(BATCH[0], target=BATCH[1], loss=F.cross_entropy)
    assert report.observation.loss == pytest.approx(
        F.cross_entropy(module.net(BATCH[0]), BATCH[1]).item()
    )
    assert "58 parameters" in str(Inspector(module).summary(BATCH[0]))


@pytest.mark.filterwarnings("ignore:You are trying to `self.log")
def test_a_module_around_it_runs_its_training_step(made):
    """As docs/how-to/tools.md has it: a functional activation of the step is a layer."""

    class Step(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, batch):
            return self.module.training_step(batch, 0)

    def training_step(self, batch, batch_idx):
        self.log("loss", 0.0)
        return F.cross_entropy(F.relu(self.net(batch[0]) - 20), batch[1])

    report = Inspector(Step(made(training_step=training_step))).run_inspection(Inputs(BATCH))
    assert any(violation.layer == "relu" for violation in report.violations)
