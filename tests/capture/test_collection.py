"""The garbage collector waits while a step runs, and is left as it was."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from pytest_modelhealth import Inspector
from pytest_modelhealth.capture.step.switches import collected_rarely


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    """Thresholds that nobody else has, put back in any case."""
    before = gc.get_threshold()
    gc.set_threshold(700, 11, 12)
    yield
    gc.set_threshold(*before)


class Notes(nn.Module):
    """Notes the thresholds that its forward runs under."""

    seen: tuple[int, int, int] = (0, 0, 0)

    def forward(self, x: Tensor) -> Tensor:
        Notes.seen = gc.get_threshold()
        return x * 2


def test_thresholds_are_higher_in_the_step_and_the_same_after_it() -> None:
    """A hundred times as many objects are waited for, in the youngest generation."""
    Inspector(Notes()).run_inspection(torch.ones(2, 3), backward=False)
    assert Notes.seen == (70_000, 11, 12)
    assert gc.get_threshold() == (700, 11, 12)


def test_thresholds_that_the_user_sets_meanwhile_stay() -> None:
    """What a model's forward sets is what a bare run would leave."""

    class Sets(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            gc.set_threshold(500, 5, 5)
            return x * 2

    Inspector(Sets()).run_inspection(torch.ones(2, 3), backward=False)
    assert gc.get_threshold() == (500, 5, 5)


def test_the_last_of_several_threads_puts_them_back() -> None:
    """They are one for the process, whoever leaves first."""
    entered, may_leave = threading.Event(), threading.Event()

    def other() -> None:
        with collected_rarely():
            entered.set()
            may_leave.wait(10)

    thread = threading.Thread(target=other)
    with collected_rarely():
        thread.start()
        assert entered.wait(10)
        assert gc.get_threshold() == (70_000, 11, 12)
    assert gc.get_threshold() == (70_000, 11, 12)
    may_leave.set()
    thread.join()
    assert gc.get_threshold() == (700, 11, 12)
