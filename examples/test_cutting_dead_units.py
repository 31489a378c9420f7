"""Cut dead units out of trained models: the copies are smaller and compute the same numbers."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples.data import VOCABULARY, read_text, shuffled_batches, text_batches
from examples.models.gpt import GPT, next_token_loss
from examples.training import accuracy, train
from pytest_modelhealth import Inspector

LENGTH = 64


def size_on_disk(model):
    """Return how many bytes a checkpoint of `model` takes."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    return file.tell()


@pytest.fixture(scope="module")
def hot_cnn(digits):
    """A CNN after 5 epochs at a learning rate so high that most ReLUs of a layer die."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10),
    )  # fmt: skip
    batches = shuffled_batches(digits.train_images, digits.train_labels, epochs=5)
    train(model, batches, F.cross_entropy, lr=0.02)
    return model


def test_cnn_keeps_its_accuracy_without_its_dead_channels(hot_cnn, digits):
    """Channels leave the convolution and the linear layer that reads them flattened."""
    units = Inspector(hot_cnn).removable(
        digits.train_images.split(128), held_out=digits.test_images.split(128)
    )
    made = units.smaller_copy()
    print(units, made, sep="\n\n")
    before, after = made.parameters
    assert after < 0.7 * before
    assert size_on_disk(made.model) < 0.7 * size_on_disk(hot_cnn)
    assert made.model[7].in_features == 16 * made.model[3].out_channels

    images, labels = digits.test_images, digits.test_labels
    assert accuracy(made.model, images, labels) == accuracy(hot_cnn, images, labels) > 0.9
    torch.testing.assert_close(made.model(images), hot_cnn(images), rtol=1e-4, atol=1e-4)


def test_cnn_trains_on_without_them(hot_cnn, digits):
    """The copy is a model like any other; the one it was made of stays as it is."""
    expected = {name: value.clone() for name, value in hot_cnn.state_dict().items()}
    images, labels = digits.train_images, digits.train_labels
    smaller = Inspector(hot_cnn).removable(images.split(128)).smaller()
    before = F.cross_entropy(smaller(images), labels)
    train(smaller, shuffled_batches(images, labels, epochs=1), F.cross_entropy, lr=1e-3)
    assert F.cross_entropy(smaller(images), labels) < before
    assert all(torch.equal(value, expected[name]) for name, value in hot_cnn.state_dict().items())


@pytest.fixture(scope="module")
def hot_gpt():
    """A GPT with ReLUs after 100 steps on Python's help, the learning rate ten times too high."""
    torch.manual_seed(0)
    model = GPT(VOCABULARY, LENGTH)
    for block in model.blocks:
        block.mlp[1] = nn.ReLU()
    train(model, text_batches(read_text(), LENGTH, steps=100), next_token_loss, lr=0.02)
    return model


def test_transformer_loses_dead_neurons_of_its_feed_forward_networks(hot_gpt):
    """They are cut out between the two linear layers; the residual stream keeps its width."""
    batches = [inputs for inputs, _ in text_batches(read_text(), LENGTH, steps=12)]
    made = Inspector(hot_gpt).removable(batches).smaller_copy()
    print(made)
    before, after = made.parameters
    assert after < before
    assert set(made.cut) <= {"blocks.0.mlp.0", "blocks.1.mlp.0"}
    assert made.model.head.in_features == hot_gpt.head.in_features
    for inputs in batches:
        torch.testing.assert_close(made.model(inputs), hot_gpt(inputs), rtol=1e-4, atol=1e-4)
