"""accelerate: a prepared model and optimizer, and the step of its loop."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples.data import shuffled_batches
from pytest_modelhealth import ModelHealthError

accelerate = pytest.importorskip("accelerate")


@pytest.fixture
def accelerator():
    """One that steps the optimizer at every second batch.

    accelerate keeps its state for the whole process: without this, the tests before would show.
    """
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)


@pytest.fixture
def prepared(accelerator):
    """A model, its optimizer and its schedule."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    return accelerator.prepare(model, optimizer, schedule)


@pytest.fixture
def step(accelerator, prepared):
    """What the loop does with each batch."""
    schedule = prepared[2]

    def step(model, optimizer, batch):
        images, labels = batch
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return loss

    return step


def test_prepared_model_is_healthy(accelerator, prepared, digits, inspector):
    """The backward pass is the accelerator's, with its scale."""
    images, labels = digits.train_images[:64], digits.train_labels[:64]
    report = inspector(prepared[0]).run_inspection(
        images, target=labels, loss=F.cross_entropy, backward=accelerator.backward
    )
    report.assert_healthy()


def test_step_trains_the_model(accelerator, prepared, step, digits, inspector):
    """Batches are accumulated over calls; the accelerator and the schedule are put back."""
    model, optimizer, _ = prepared
    batch = digits.train_images[:64], digits.train_labels[:64]
    inspector(model).run_step(step, optimizer, batch, calls=4).assert_healthy()
    assert accelerator.step == 0


def test_loop_is_healthy(prepared, step, digits, inspector):
    """A step of the monitor is one of the optimizer: two batches."""
    model, optimizer, _ = prepared
    batches = shuffled_batches(digits.train_images, digits.train_labels, epochs=2)
    with inspector(model).monitor() as monitor:
        for number, batch in enumerate(batches):
            loss = step(model, optimizer, batch)
            if number % 2:
                monitor.step_end(number // 2, loss=loss)
    monitor.assert_healthy()
    assert monitor.history.loss[-1] < 0.8 * monitor.history.loss[0], monitor


def test_a_backward_beside_the_accelerator_is_found(accelerator, prepared, digits, inspector):
    """``accelerator.backward`` divides by the number of batches, ``loss.backward`` does not."""

    def step(model, optimizer, batch):
        total = 0.0
        for images, labels in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item() / 2
        return total

    model, optimizer, _ = prepared
    batch = digits.train_images[:64], digits.train_labels[:64]
    with pytest.raises(ModelHealthError, match=r"2(\.00\d)? times the slope of the loss"):
        inspector(model).run_step(step, optimizer, batch).assert_healthy()
