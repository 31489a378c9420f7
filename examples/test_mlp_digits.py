"""A multilayer perceptron on real digits: the smallest complete example."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from examples.data import shuffled_batches
from examples.models.mlp import MLP
from examples.training import accuracy, train


@pytest.fixture(scope="session")
def mlp(digits):
    """An `MLP` after 15 epochs."""
    torch.manual_seed(0)
    model = MLP()
    batches = shuffled_batches(digits.train_images, digits.train_labels, epochs=15)
    train(model, batches, F.cross_entropy, lr=3e-3)
    return model


def test_learned_the_digits(mlp, digits):
    """Over 95 % of the held-out digits are recognised."""
    assert accuracy(mlp, digits.test_images, digits.test_labels) > 0.95


def test_trained_model_is_healthy(mlp, digits, inspector):
    """One call runs forward and backward, one verdict covers every layer."""
    report = inspector(mlp).run_inspection(
        digits.test_images, target=digits.test_labels, loss=F.cross_entropy
    )
    report.assert_healthy()


@pytest.mark.modelhealth(max_grad_norm=10.0, min_grad_norm=1e-6)
def test_gradients_reach_every_layer(digits, inspector):
    """The marker sets the limits; the report is checked when the test's body ends."""
    torch.manual_seed(0)
    inspector(MLP()).run_inspection(
        digits.train_images[:256], target=digits.train_labels[:256], loss=F.cross_entropy
    )


def test_initialised_model_has_not_drifted(digits, inspector, health_snapshot):
    """A fresh model has the statistics on record: a changed layer or initialisation shows here."""
    torch.manual_seed(0)
    report = inspector(MLP().eval()).run_inspection(
        digits.train_images[:256], target=digits.train_labels[:256], loss=F.cross_entropy
    )
    assert report == health_snapshot
