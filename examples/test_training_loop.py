"""A training loop under a monitor: what a loop does wrong shows in its first steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from examples.data import shuffled_batches
from examples.models.cnn import CNN


def run_training(model, digits, inspector, lr, epochs):
    """Train for epochs of 23 steps, and return the monitor that watched every fifth step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    batches = shuffled_batches(digits.train_images, digits.train_labels, epochs)
    model.train()
    with inspector(model).monitor(every=5) as monitor:
        for step, (images, labels) in enumerate(batches):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            monitor.step_end(step, loss=loss)
    return monitor


@pytest.fixture(scope="module")
def monitor(digits):
    """The monitor of a training that goes well."""
    from pytest_modelhealth import Inspector

    torch.manual_seed(0)
    return run_training(CNN(), digits, Inspector, lr=3e-3, epochs=2)


def test_the_loss_falls_and_every_layer_learns(monitor):
    """A failure prints the monitor: its first line names the worst layer, and since when."""
    history = monitor.history
    assert history.steps.tolist() == [0, 5, 10, 15, 20, 25, 30, 35, 40, 45]
    assert history.loss[-1] < 0.5 * history.loss[0], monitor
    learning = ~np.isnan(history["update_ratio"][-1])
    ratios = history["update_ratio"][:, learning]
    assert ratios.shape[1] == 5
    assert ratios.min() > 1e-5, monitor
    assert ratios.max() < 0.2, monitor


def test_no_unit_dies(monitor):
    """`F.relu` is a layer as well; the running record has a number for each step."""
    for layer in ("relu", "relu_1"):
        assert monitor.history[layer, "dead_fraction"].max() < 0.2, monitor


def test_the_training_can_be_looked_at(monitor, tmp_path):
    """One picture of all layers."""
    monitor.plot(tmp_path / "training.png")
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


def test_a_rate_that_kills_the_model_shows_at_once(digits, inspector):
    """At a rate of 30 weights are replaced rather than changed."""
    torch.manual_seed(0)
    monitor = run_training(CNN(), digits, inspector, lr=30.0, epochs=1)
    assert monitor.history["conv1", "update_ratio"].max() > 0.2
