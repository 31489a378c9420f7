"""A convolutional network on real digits: BatchNorm, dropout and functional activations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from examples.data import shuffled_batches
from examples.models.cnn import CNN
from examples.training import accuracy, train


@pytest.fixture(scope="session")
def cnn(digits):
    """A `CNN` after 4 epochs."""
    torch.manual_seed(0)
    model = CNN()
    batches = shuffled_batches(digits.train_images, digits.train_labels, epochs=4)
    train(model, batches, F.cross_entropy, lr=1e-2)
    return model


def test_learned_the_digits(cnn, digits):
    """Over 95 % of the held-out digits are recognised."""
    assert accuracy(cnn, digits.test_images, digits.test_labels) > 0.95


def test_trained_model_is_healthy(cnn, digits, inspector):
    """`F.relu` is a layer as well: it is listed as ``CNN.relu`` and checked for dead units."""
    report = inspector(cnn).run_inspection(
        digits.test_images, target=digits.test_labels, loss=F.cross_entropy
    )
    report.assert_healthy()


def test_inspection_leaves_the_running_averages_alone(cnn, digits, inspector):
    """A run in training mode would move BatchNorm's averages; an inspection puts them back."""
    before = {name: value.clone() for name, value in cnn.state_dict().items()}
    cnn.train()
    try:
        inspector(cnn).run_inspection(
            digits.train_images[:256], target=digits.train_labels[:256], loss=F.cross_entropy
        )
    finally:
        cnn.eval()
    for name, value in cnn.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.modelhealth(layers="conv*", max_grad_norm=10.0, min_grad_norm=1e-4)
def test_gradients_reach_the_convolutions(digits, inspector):
    """With ``layers`` only the convolutions are judged, by stricter limits than the defaults."""
    torch.manual_seed(0)
    inspector(CNN()).run_inspection(
        digits.train_images[:256], target=digits.train_labels[:256], loss=F.cross_entropy
    )


def test_initialised_model_has_not_drifted(digits, inspector, health_snapshot):
    """A fresh model has the statistics on record; evaluation mode keeps dropout out of them."""
    torch.manual_seed(0)
    report = inspector(CNN().eval()).run_inspection(
        digits.train_images[:256], target=digits.train_labels[:256], loss=F.cross_entropy
    )
    assert report == health_snapshot
