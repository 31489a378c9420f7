"""Wrong arguments and calls in the wrong order: an error that says so, and nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pytest_modelhealth import InspectionError, Inspector, ModelHealthWarning, UnknownNameError
from tests.training.models import batch, loss_of, net, train
from tests.training.traces import traces


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every must be a whole number from 1 on, not 0"),
        ({"every": 2.0}, "every must be a whole number from 1 on, not 2.0"),
        ({"every": True}, "every must be a whole number"),
        ({"every": [batch()]}, "every must be a whole number from 1 on, not a list"),
        ({"every": None}, "every must be a whole number"),
        ({"keep": 1}, "keep must be a whole number from 2 on, not 1"),
        ({"keep": "all"}, "keep must be a whole number"),
        ({"csv": 3}, "csv must be the path of the file to write, such as 'health.csv', not 3"),
        ({"csv": ""}, "csv must be the path"),
        ({"csv": True}, "csv must be the path"),
        ({"csv": b"a.csv"}, "csv must be the path"),
        ({"on_violation": "rais"}, "on_violation must be 'raise', 'warn'"),
        ({"on_violation": 3}, "on_violation must be 'raise', 'warn'"),
        ({"on_violation": True}, "on_violation must be 'raise', 'warn'"),
        ({"scaler": 65536.0}, "pass the torch.amp.GradScaler itself"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    """Before anything is put on the model or written."""
    model = net()
    with pytest.raises(InspectionError, match=message):
        Inspector(model).monitor(**arguments)
    assert traces(model) == []


def test_what_no_loop_can_train_is_refused() -> None:
    """A monitor needs the module itself."""
    exported = torch.export.export(net().eval(), (batch()[0],))
    with pytest.raises(InspectionError, match=r"watches a torch\.nn\.Module"):
        Inspector(exported).monitor()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (torch.ones(3), r"is a tensor of shape \(3,\) and torch.float32, not a real scalar"),
        (torch.ones((), dtype=torch.complex64), "complex64, not a real scalar"),
        ("low", "is 'low', not a real scalar"),
        ([1.0], "is a list, not a real scalar"),
        (nn.CrossEntropyLoss(), "is a CrossEntropyLoss, not a real scalar"),
    ],
)
def test_a_loss_that_is_no_scalar_is_refused(loss: object, message: str) -> None:
    """The step stays as it was seen: the call may be made again, with any single number."""
    model = net()
    with Inspector(model).monitor() as monitor:
        loss_of(model).backward()
        with pytest.raises(InspectionError, match=message):
            monitor.step_end(0, loss=loss)
        for step, right in enumerate((2, torch.tensor([2.0]), np.float32(2), torch.tensor(2))):
            monitor.step_end(step, loss=right)
            assert monitor.latest.loss == 2.0
            assert step or monitor.report["a"].gradients is not None


def test_numbers_of_steps_must_rise() -> None:
    """Twice, backwards, or no number: refused, and the next right one is taken."""
    model = net()
    with Inspector(model).monitor() as monitor:
        for wrong, message in (
            (None, ""),
            (0, r"step_end\(0\) was called after step 0"),
            (-1, "step must be a whole number from 0 on"),
            ("1", "step must be a whole number"),
            (1.0, "step must be a whole number"),
            (torch.tensor(1), "step must be a whole number"),
            (np.int64(5), ""),
            (3, r"step_end\(3\) was called after step 5: numbers of steps must rise"),
        ):
            loss_of(model).backward()
            if message:
                with pytest.raises(InspectionError, match=message):
                    monitor.step_end(wrong)
            else:
                monitor.step_end(wrong)
        monitor.step_end(9)
    assert monitor.history.steps.tolist() == [0, 5, 9]


def test_a_monitor_watches_one_training() -> None:
    """Before it begins and after it has ended no step is taken; its numbers stay."""
    model = net()
    monitor = Inspector(model).monitor()
    with pytest.raises(InspectionError, match="the monitor has not begun"):
        monitor.step_end()
    latest: list[Callable[[], object]] = [lambda: monitor.latest, lambda: monitor.report]
    for ask in (*latest, monitor.assert_healthy):
        with pytest.raises(InspectionError, match="no step was watched yet"):
            ask()
    assert str(monitor) == "training of Net: no step was watched yet"
    with monitor:
        train(model, monitor, 2)
        with pytest.raises(InspectionError, match="was started already"):
            monitor.start()
    with pytest.raises(InspectionError, match="the monitor has ended"):
        monitor.step_end()
    with pytest.raises(InspectionError, match="was closed already"):
        monitor.start()
    monitor.close()
    assert len(monitor.history) == 2
    assert monitor.report["a"].calls == 1


def test_a_loop_that_ends_no_step_is_warned_of() -> None:
    """A loop that is empty is not, nor one that raised."""
    model = net()
    monitor = Inspector(model).monitor()
    with pytest.warns(ModelHealthWarning, match=r"step_end\(\) was never called"), monitor:
        train(model, steps=2)
    with Inspector(model).monitor():
        pass
    monitor = Inspector(model).monitor()
    with pytest.raises(ZeroDivisionError), monitor:
        train(model, steps=2, after=lambda step: 1 / 0)


@pytest.mark.parametrize(("wrong", "right"), [("step_ends", "step_end"), ("histroy", "history")])
def test_names_that_a_monitor_does_not_have_are_explained(wrong: str, right: str) -> None:
    """The nearest is named."""
    with pytest.raises(UnknownNameError, match=f"has no '{wrong}'; did you mean '{right}'"):
        getattr(Inspector(net()).monitor(), wrong)
