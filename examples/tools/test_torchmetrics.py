"""Outputs that are dictionaries, several losses by name, and metrics inside the model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_modelhealth import ModelHealthError

torchmetrics = pytest.importorskip("torchmetrics")


class Reader(nn.Module):
    """Says which digit it is and how much ink it has; returns losses and metrics by name.

    Args:
        reads_ink: whether the loss has the term for the second head.
    """

    def __init__(self, *, reads_ink: bool = True) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU())
        self.digit, self.ink = nn.Linear(128, 10), nn.Linear(128, 1)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=10)
        self.reads_ink = reads_ink

    def forward(self, images, labels):
        hidden = self.trunk(images)
        logits, ink = self.digit(hidden), self.ink(hidden).squeeze(1)
        losses = {
            "digit": F.cross_entropy(logits, labels),
            "ink": F.mse_loss(ink, images.mean(dim=(1, 2, 3))),
        }
        total = losses["digit"] + losses["ink"] if self.reads_ink else losses["digit"]
        return {
            "loss": total,
            "losses": {name: loss.detach() for name, loss in losses.items()},
            "metrics": {"accuracy": self.accuracy(logits, labels)},
        }


@pytest.fixture
def batch(digits):
    """A mapping, which goes in as keywords."""
    torch.manual_seed(0)
    return {"images": digits.train_images[:128], "labels": digits.train_labels[:128]}


def test_reader_is_healthy(batch, inspector):
    """``output["loss"]`` is the loss; the metric is put back, so that it counts no test batch."""
    model = Reader()
    inspector(model).run_inspection(batch).assert_healthy()
    assert not model.accuracy.update_called


def test_step_returns_a_dictionary(batch, inspector):
    """``loss`` in what a step returns is the loss, whatever else there is."""

    def step(model, optimizer, batch):
        optimizer.zero_grad()
        output = model(**batch)
        output["loss"].backward()
        optimizer.step()
        return output

    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters())
    inspector(model).run_step(step, optimizer, batch).assert_healthy()


losses = {
    "digit": lambda output, labels: F.cross_entropy(output["digit"], labels),
    "ink": lambda output, ink: F.mse_loss(output["ink"], ink),
}


def test_losses_by_name_are_compared(digits, inspector):
    """Losses given by name are added, and each is asked what it wants of the shared layers."""

    class Heads(Reader):
        def forward(self, images):
            hidden = self.trunk(images)
            return {"digit": self.digit(hidden), "ink": self.ink(hidden).squeeze(1)}

    images, labels = digits.train_images[:128], digits.train_labels[:128]
    report = inspector(Heads()).run_inspection(
        images,
        target={"digit": labels, "ink": images.mean(dim=(1, 2, 3))},
        loss=losses,
    )
    report.assert_healthy()
    assert [task.name for task in report.observation.tasks] == ["digit", "ink"]


def test_a_loss_that_misses_a_head_is_found(batch, inspector):
    """The head is computed, logged, and never learns."""
    with pytest.raises(ModelHealthError, match=r"ink \(missing_gradients\)"):
        inspector(Reader(reads_ink=False)).run_inspection(batch).assert_healthy()
