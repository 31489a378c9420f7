"""A step of accelerate: its loop steps at every n-th call, by an optimizer that wraps another."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pytest_modelhealth import Inspector
from tests.training.steps import X, Y, net

accelerate = pytest.importorskip("accelerate")

Prepared = tuple[Any, Any, Any, Any]


@pytest.fixture
def prepare() -> Callable[[int], Prepared]:
    """Make an accelerator that accumulates so many calls, a model, its optimizer and schedule."""

    def prepare(count: int) -> Prepared:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=count)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
        return accelerator, *accelerator.prepare(model, optimizer, schedule)

    return prepare


@pytest.mark.parametrize("calls", [3, 4])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_a_loop_that_accumulates_over_calls_is_healthy(
    prepare: Callable[[int], Prepared], count: int, calls: int
) -> None:
    """Each series of calls begins where the first did, and all is put back in the end."""
    accelerator, model, optimizer, schedule = prepare(count)
    counted: queue.SimpleQueue[int] = queue.SimpleQueue()  # lists are put back

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        counted.put(accelerator.step)
        with accelerator.accumulate(model):
            loss = F.cross_entropy(model(batch[0]), batch[1])
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return loss

    report = Inspector(model).run_step(step, optimizer, (X, Y), calls=calls)
    assert report.healthy, report
    begun = [counted.get() for _ in range(counted.qsize())]
    assert begun[:calls] == list(range(calls))
    assert max(begun) < max(calls, count)  # more are made where none has stepped
    assert (accelerator.step, schedule.scheduler.last_epoch) == (0, 0)
    assert accelerator.sync_gradients


def test_another_optimizer_in_each_call_is_still_found(
    prepare: Callable[[int], Prepared],
) -> None:
    """One that was given and never steps, inside a wrapper or not, is no alibi."""
    _, model, optimizer, _ = prepare(1)

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        own = torch.optim.AdamW(model.parameters())
        own.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        own.step()
        return loss

    report = Inspector(model).run_step(step, optimizer, (X, Y))
    assert [one.check for one in report.violations] == ["parameter_updates"]
    assert "never steps" in report.violations[0].message
