"""The garbage collector waits while a step runs, and is left as it was."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from pytest_modelhealth import Inspector
from pytest_modelhealth.capture.step.switches import collected_rarely

USUAL, RARE = (700, 11, 12), (70_000, 11, 12)


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    """Thresholds that nobody else has, put back in any case."""
    before = gc.get_threshold()
    gc.set_threshold(*USUAL)
    yield
    gc.set_threshold(*before)


class Does(nn.Module):
    """Does something with the collector in its forward."""

    def __init__(self, what: Callable[[], object]) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        self.what()
        return x * 2


@pytest.mark.parametrize(
    ("what", "after"),
    [
        (lambda: None, USUAL),
        (lambda: 1 / 0, USUAL),
        (lambda: gc.set_threshold(500, 5, 5), (500, 5, 5)),  # as a bare run would leave them
    ],
)
def test_a_step_runs_under_higher_thresholds(
    what: Callable[[], object], after: tuple[int, int, int]
) -> None:
    """A hundred times as many objects are waited for; afterwards they are what they were."""
    seen = []
    model = Does(lambda: (seen.append(gc.get_threshold()), what()))
    try:
        Inspector(model).run_inspection(torch.ones(2, 3), backward=False)
    except ZeroDivisionError:
        assert after is USUAL
    assert seen == [RARE]
    assert gc.get_threshold() == after


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
    assert gc.get_threshold() == RARE
    may_leave.set()
    thread.join()
    assert gc.get_threshold() == USUAL
