"""Several named losses: their sum, their gradients, and the check `task_balance`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_modelhealth import InspectionError, Inspector


class TwoHeads(nn.Module):
    """A trunk that two tasks share."""

    def __init__(self):
        super().__init__()
        self.trunk, self.last = nn.Linear(16, 8), nn.Linear(8, 8)
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 1)

    def forward(self, x):
        h = self.last(self.trunk(x).tanh()).tanh()
        return {"a": self.a(h), "b": self.b(h)}


@pytest.fixture
def model():
    """A fresh model with two heads."""
    return TwoHeads()


@pytest.fixture
def target():
    """Classes for one task, numbers for the other."""
    return {"classes": torch.randint(0, 4, (64,)), "number": torch.randn(64, 1)}


def classes(output, target):
    """The loss of the one task."""
    return F.cross_entropy(output["a"], target)


def number(output, target):
    """The loss of the other."""
    return F.mse_loss(output["b"], target)


LOSSES = {"classes": classes, "number": number}


def findings(report):
    """Return what the check found."""
    return [v for v in report.violations if v.check == "task_balance"]


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


def test_task_that_drowns_another_is_named(model, target, batch, inspect):
    """A loss a million times too large is found at the last layer that the tasks share."""
    losses = LOSSES | {"number": lambda o, t: 1e6 * number(o, t)}
    (violation,) = findings(inspect(model, batch, target, loss=losses))
    assert violation.layer == "last"
    assert "'number' has" in violation.message
    assert (violation.limit, violation.origin) == (100.0, "default")


def test_small_weight_may_be_meant(model, target, batch, inspect):
    """A weight of a thousandth is warned of; of who set the limit, it is not."""
    losses = LOSSES | {"number": lambda o, t: 1e-3 * number(o, t)}
    report = inspect(model, batch, target, loss=losses)
    assert findings(report) == []
    assert "may be meant" in report.warnings[0].cause
    report = inspect(model, batch, target, loss=losses, settings={"max_task_ratio": 100.0})
    assert len(findings(report)) == 1


def test_balanced_tasks_are_no_fault(model, target, batch, inspect):
    """Losses of different kinds, added as they are, are healthy; so is one loss."""
    assert findings(inspect(model, batch, target, loss=LOSSES)) == []
    single = {"classes": classes}
    assert findings(inspect(model, batch, target, loss=single)) == []


def test_tasks_without_a_shared_layer_are_no_fault(batch, inspect):
    """Two models in one have nothing to balance."""

    class Apart(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 4), nn.Linear(16, 1)

        def forward(self, x):
            return self.a(x), self.b(x)

    losses = {"a": lambda o: 1e6 * o[0].pow(2).mean(), "b": lambda o: o[1].pow(2).mean()}
    assert findings(inspect(Apart(), batch, loss=losses)) == []


def test_task_that_asks_for_nothing_is_inconclusive(model, batch, inspect):
    """A hinge that is met has a loss of zero and a gradient of zero."""
    losses = {
        "a": lambda o: o["a"].pow(2).mean(),
        "b": lambda o: F.relu(o["b"] - 100.0).mean(),
    }
    report = inspect(model, batch, loss=losses)
    assert findings(report) == []
    assert "task_balance" in {finding.check for finding in report._judgement.inconclusive}


def test_conflict_is_a_note(model, batch, inspect):
    """Tasks that pull in opposite directions are told of, and fail nothing."""
    losses = {"up": lambda o: o["a"].mean() + 10.0, "down": lambda o: 10.0 - o["a"].mean()}
    report = inspect(model, batch, loss=losses)
    assert any("'up' and 'down' pull against each other" in n for n in report.observation.notes)
    assert findings(report) == []


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
        ({}, "names no loss"),
        ({"a": 3}, "task 'a' is of type int"),
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


def rounded(output, target):
    """A loss of what was rounded, which has no gradient."""
    return F.mse_loss(output["b"].round(), target)


def asks_nothing(report):
    """What is said of tasks that ask for nothing."""
    return [v for v in report.violations if "asks nothing of any" in v.message]


def test_task_without_a_gradient(model, batch, target, inspect):
    """A task whose loss is something, and whose gradient is nothing, is a fault, said once."""
    losses = {"classes": classes, "number": rounded}
    report = inspect(model, batch, target, loss=losses, settings={"checks": ["task_balance"]})
    (violation,) = report.violations
    assert violation.message.startswith("task 'number' has a loss of")
    assert violation.layer == "b"


def test_task_that_shares_no_layer(batch, target, inspect):
    """So is one that reaches no layer of another."""

    class Apart(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(16, 4), nn.Linear(16, 1)

        def forward(self, x):
            return {"a": self.a(x), "b": self.b(x)}

    losses = {"classes": classes, "number": rounded}
    settings = {"checks": ["task_balance"]}
    assert asks_nothing(inspect(Apart(), batch, target, loss=losses, settings=settings))
    assert not asks_nothing(inspect(Apart(), batch, target, loss=LOSSES, settings=settings))


def test_task_with_a_weight_of_zero(model, batch, target, inspect):
    """A task that is multiplied by zero is warned of with its line; it is off, and no fault."""
    losses = {"classes": classes, "number": lambda o, t: 0.0 * number(o, t)}
    report = inspect(model, batch, target, loss=losses)
    assert report.violations == ()
    (warning,) = (v for v in report.warnings if v.check == "loss")
    assert "multiplied by 0 at" in warning.message
