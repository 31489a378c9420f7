"""Lightning: a `LightningModule` is inspected, its step is tested, and a `Trainer` is watched."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from examples.data import read_digits
from pytest_modelhealth import Inputs, ModelHealthError, ModelHealthSuite

pl = pytest.importorskip("lightning.pytorch")

# what Lightning says about the number of workers and its own use of torch
pytestmark = pytest.mark.filterwarnings("ignore:::lightning")

SETTINGS = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Classifier(pl.LightningModule):
    """A perceptron on the digits, as people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images):
        return self.net(images)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        self.log("loss", loss)
        self.log("accuracy", (logits.argmax(1) == labels).float().mean())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


@pytest.fixture
def loader(digits):
    """Batches as the trainer gets them: pairs of images and labels."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(digits.train_images, digits.train_labels)
    return DataLoader(data, batch_size=64, shuffle=True, generator=generator)


@pytest.fixture
def module():
    """A fresh module."""
    torch.manual_seed(0)
    return Classifier()


class Step(nn.Module):
    """The training step of a `LightningModule` as a forward."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, batch):
        return self.module.training_step(batch, 0)


def test_training_step_is_healthy(module, loader, inspector):
    """What it returns is the loss; its `self.log` needs no trainer."""
    inspector(Step(module)).run_inspection(Inputs(next(iter(loader)))).assert_healthy()


def test_optimizer_and_schedule_train_it(module, loader, inspector):
    """``training_step`` with what ``configure_optimizers`` returns, called a few times."""
    inspector(module).run_step(batch=next(iter(loader))).assert_healthy()


def test_samples_do_not_see_each_other(module, loader, inspector):
    """An inspection runs the forward, with a target and a loss as of any module."""
    images, labels = next(iter(loader))
    report = inspector(module).run_inspection(
        images, target=labels, loss=F.cross_entropy, probes="sample_independence"
    )
    report.assert_samples_independent()


def test_one_epoch_is_healthy(module, loader, inspector):
    """The callback starts the monitor, ends its steps and takes it off again."""
    monitor = inspector(module).monitor(every=5)
    trainer = pl.Trainer(callbacks=[monitor.callback("lightning")], **SETTINGS)
    trainer.fit(module, loader)
    monitor.assert_healthy()
    assert monitor.history.loss[-1] < 0.8 * monitor.history.loss[0], monitor


class TestClassifier(ModelHealthSuite):
    """Every test of a model: a module, a batch and a loss are enough."""

    def make(self):
        digits = read_digits()
        images, labels = digits.train_images[:64], digits.train_labels[:64]
        return Classifier(), images, labels, F.cross_entropy


class Unfinished(Classifier):
    """The optimizer was written when there was no head yet."""

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net[1].parameters(), lr=3e-3)


def test_a_layer_without_an_optimizer_is_found(loader, inspector):
    """The loss falls all the same, as the layer before it learns."""
    with pytest.raises(ModelHealthError, match=r"net.3 \(trained_parameters\).*in no optimizer"):
        inspector(Unfinished()).run_step(batch=next(iter(loader))).assert_healthy()
