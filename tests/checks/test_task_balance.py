"""Several named losses: their sum, their gradients, and the check `task_balance`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from corpus.checks.task_balance import LOSSES, classes, number, targets, two_heads, weighted
from pytest_modelhealth import InspectionError, Inspector


@pytest.fixture
def model():
    """A fresh model with two heads."""
    return two_heads()


@pytest.fixture
def target():
    """What the two tasks are asked for."""
    return targets()


def test_limit_of_the_default_and_of_the_user(model, target, batch, inspect, only):
    """A weight of a thousandth, which may be meant, is a fault for who set the limit."""
    report = inspect(model, batch, target, loss=weighted(1e6))
    (violation,) = (v for v in report.violations if v.check == "task_balance")
    assert (violation.limit, violation.origin) == (100.0, "default")
    strict = {"settings": {"max_task_ratio": 100.0}}
    only(inspect(model, batch, target, loss=weighted(1e-3), **strict), "task_balance")


def test_the_run_is_that_of_the_sum_bit_for_bit(model, target, batch, inspect):
    """Loss and gradients are those of a bare step on the losses added by hand."""
    out = model(batch)
    total = classes(out, target["classes"]) + number(out, target["number"])
    total.backward()
    expected = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    seen = {}

    def backward(loss):
        loss.backward()
        seen.update({n: p.grad.clone() for n, p in model.named_parameters()})

    report = inspect(model, batch, target, loss=LOSSES, backward=backward)
    assert report.loss == total.item()
    assert all(torch.equal(seen[name], gradient) for name, gradient in expected.items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_of_each_task_are_those_of_its_own_backward(model, target, batch, inspect):
    """Norms and cosines are NumPy's, of gradients taken by one backward for each task."""
    tasks = inspect(model, batch, target, loss=LOSSES).observation.tasks
    vectors = {}
    for name, loss in LOSSES.items():
        model.zero_grad()
        loss(model(batch), target[name]).backward()
        gradients = [p.grad.double().numpy().ravel() for p in model.last.parameters()]
        vectors[name] = np.concatenate(gradients)
    one, other = (vectors[name] for name in LOSSES)
    assert [task.name for task in tasks] == ["classes", "number"]
    for task in tasks:
        expected = np.linalg.norm(vectors[task.name])
        assert task.gradient_norms["last"] == pytest.approx(expected, rel=1e-5)
    assert "b" not in tasks[0].gradient_norms
    (pair,) = tasks[0].pairs
    cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    assert pair.cosines["last"] == pytest.approx(cosine, abs=1e-5)
    assert set(pair.cosines) == {"trunk", "last"}


def test_conflict_is_a_note(model, batch, inspect):
    """Tasks that pull in opposite directions are told of, and fail nothing."""
    losses = {"up": lambda o: o["a"].mean() + 10.0, "down": lambda o: 10.0 - o["a"].mean()}
    report = inspect(model, batch, loss=losses)
    assert any("'up' and 'down' pull against each other" in n for n in report.observation.notes)
    assert "task_balance" not in {found.check for found in report._judgement.findings}


def test_scaler_leaves_the_gradients_of_tasks_unscaled(model, target, batch, inspect):
    """Under a gradient scaler norms are those of the losses themselves."""
    plain = inspect(model, batch, target, loss=LOSSES).observation.tasks
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled = inspect(model, batch, target, loss=LOSSES, scaler=scaler).observation.tasks
    for a, b in zip(plain, scaled, strict=True):
        assert a.gradient_norms == pytest.approx(b.gradient_norms, rel=1e-5)


def test_without_a_backward_there_are_losses_and_no_tasks(model, target, batch, inspect):
    """backward=False leaves the passes of the tasks out too."""
    report = inspect(model, batch, target, loss=LOSSES, backward=False)
    assert report.observation.tasks == ()
    assert report.loss is not None


@pytest.mark.parametrize(
    ("losses", "says"),
    [
        ({"a": lambda o: o["a"].mean(), "b": lambda o: o["b"].sum().item()}, "task 'b' returned"),
        ({"a": lambda o: o["a"].mean(), "b": lambda o: o["b"].detach().sum()}, "'b' has no graph"),
        (
            {"a": lambda o: o["a"].mean(), "b": lambda o: torch.ones((), requires_grad=True) * 1},
            "task 'b' gives no parameter a gradient",
        ),
    ],
)
def test_mistakes_name_the_task(model, batch, losses, says):
    """What is wrong with which task is said, and the model is as it was."""
    with pytest.raises(InspectionError, match=says):
        Inspector(model).run_inspection(batch, loss=losses)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_target_for_some_tasks_only_is_refused(model, target, batch):
    """A mapping that lacks a task's target would go whole to that task."""
    with pytest.raises(InspectionError, match="no value for task 'number'"):
        Inspector(model).run_inspection(batch, {"classes": target["classes"]}, loss=LOSSES)
