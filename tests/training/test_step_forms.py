"""The forms in which people write a step: each runs, and a sound one has no objection."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth import Inspector
from tests.training.steps import X, Y, entropy, net, ran, sgd, usual


def test_several_optimizers_as_tuple_list_and_mapping() -> None:
    """Each is seen by itself, and the step gets the very object that was given."""
    model = net()
    first, second = sgd(model.into), torch.optim.Adam(model.out.parameters(), lr=1e-2)
    forms: list[Any] = [(first, second), [first, second], {"body": first, "head": second}]
    for form in forms:

        def step(model: Any, optimizer: Any, batch: Any, form: Any = form) -> Tensor:
            assert optimizer is form
            first.zero_grad()
            loss = usual(model, second, batch)
            first.step()
            return loss

        report = ran(step, model, form)
        kinds = [(o.type_name, o.steps, o.given) for o in report.observation.stepped.optimizers]
        assert kinds == [("SGD", (1, 1, 1), True), ("Adam", (1, 1, 1), True)]
        assert report.healthy, str(report)
        assert not report.warnings, str(report)
    assert not second.state


def test_closures() -> None:
    """LBFGS: the gradient is that of the first evaluation; no slope is measured."""
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5)

    def step(model: Any, optimizer: Any, batch: Any) -> float:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = entropy(model, batch)
            loss.backward()
            return loss

        return float(optimizer.step(closure).detach())

    report = ran(step, model, optimizer)
    assert report.healthy, str(report)
    (seen,) = report.observation.stepped.optimizers
    assert (seen.traits, seen.steps) == ({"closure"}, (1, 1, 1))
    assert report.observation.stepped.slope is None
    weight = model.into.weight
    (expected,) = torch.autograd.grad(entropy(model, (X, Y)), [weight])
    found = next(p for p in report.observation.stepped.parameters if p.name == "into.weight")
    assert found.gradients[0] == pytest.approx(float(expected.norm()), rel=1e-4)


@pytest.mark.parametrize("unscales", [True, False])
def test_a_gradient_scaler_in_order(unscales: bool) -> None:
    """Its scale is removed in `scaler.step`, before the optimizer's own step."""
    model = net()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(batch[0]).float(), batch[1])
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    report = ran(step, model, optimizer, restore=scaler)
    assert report.healthy, str(report)
    assert not report.warnings, str(report)
    found = next(p for p in report.observation.stepped.parameters if p.name == "into.weight")
    assert found.added[0] > 1000 * found.gradients[0] / 48  # scaled when it was left
    assert found.gradients[0] < 10


def accumulating(every: int) -> Callable[[Any, Any, Any], Tensor]:
    """Return a step that lets gradients add up over calls."""
    count = [0]

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss = entropy(model, batch)
        (loss / every).backward()
        count[0] += 1
        if count[0] % every == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step


@pytest.mark.parametrize("order", ["add_", "add, then set", "step first"])
def test_the_step_moves_the_weights_itself(order: str) -> None:
    """No optimizer is needed, and all is put back."""
    model = net()
    before = copy.deepcopy(model.state_dict())

    def move(model: Any) -> None:
        for p in (p for p in model.parameters() if p.grad is not None):
            if order == "add, then set":
                p.data = p.data - 0.1 * p.grad
            else:
                p.data.add_(p.grad, alpha=-0.1)

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        if order == "step first":
            move(model)
        model.zero_grad()
        loss = entropy(model, batch)
        loss.backward()
        if order != "step first":
            move(model)
        return loss

    report = Inspector(model).run_step(step, batch=(X, Y))
    report.assert_healthy()
    assert not report.warnings
    stepped = report.observation.stepped
    assert stepped.losses[-1] < stepped.losses[0]
    assert all(any(p.updates) and p.held for p in stepped.parameters)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_gradients_may_add_up_over_calls() -> None:
    """More calls are made until the optimizer steps, and a count in the closure starts anew."""
    step = accumulating(4)
    for _ in range(2):
        report = ran(step)
        stepped = report.observation.stepped
        assert stepped.optimizers[0].steps == (0, 0, 0, 1)
        assert report.healthy, str(report)
    assert len(ran(accumulating(2)).observation.stepped.losses) == 3


def test_an_optimizer_may_step_within_the_backward_pass() -> None:
    """One a parameter, in hooks, which stay; none of them was given to the step but by a tuple."""
    model = net()
    own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def take(parameter: Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    hooks = [p.register_post_accumulate_grad_hook(take) for p in model.parameters()]

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss = entropy(model, batch)
        loss.backward()
        return loss

    before = {key: value.clone() for key, value in model.state_dict().items()}
    report = ran(step, model, tuple(own.values()))
    assert report.healthy, str(report)
    assert [o.steps for o in report.observation.stepped.optimizers] == [(1, 1, 1)] * 4
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(list(p._post_accumulate_grad_hooks.values()) == [take] for p in own)
    for hook in hooks:
        hook.remove()


class Trainer:
    """Has its step as a method, and can be called itself."""

    def __init__(self) -> None:
        self.calls = 0

    def step(self, model: Any, optimizer: Any, batch: Any) -> Tensor:
        """Make a step."""
        self.calls += 1
        return usual(model, optimizer, batch)

    __call__ = step


def test_methods_partials_and_objects_are_steps() -> None:
    """What they count is put back."""
    trainer = Trainer()

    def scaled(model: Any, optimizer: Any, batch: Any, factor: float) -> Tensor:
        return factor * usual(model, optimizer, batch)

    for form in (trainer.step, functools.partial(scaled, factor=1.0), trainer):
        report = ran(form)
        assert report.healthy, str(report)
    assert trainer.calls == 0


class Out:
    """What a library's model returns."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


@pytest.mark.parametrize(
    "form",
    [
        lambda loss: loss.item(),
        lambda loss: loss.detach().numpy(),
        lambda loss: {"loss": loss, "accuracy": torch.tensor([1.0, 2.0])},
        lambda loss: {"a": loss / 2, "b": loss.item() / 2},
        lambda loss: (loss / 4, 3 * loss / 4),
        Out,
        lambda loss: loss.reshape(1),
    ],
    ids=["float", "numpy", "mapping", "losses", "tuple", "object", "one-value"],
)
def test_losses_of_many_forms(form: Callable[[Tensor], Any]) -> None:
    """All say the same number."""

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        return form(usual(model, optimizer, batch))

    report = ran(step)
    assert report.observation.stepped.losses == pytest.approx((1.1119, 1.0955, 1.0806), abs=0.2)
    assert report.observation.stepped.slope.factor == pytest.approx(1.0, abs=0.01)
    assert report.healthy, str(report)


def test_the_usual_step_inspects_the_batch_too() -> None:
    """What an inspection finds and what the step shows stand in one report."""
    model = net()
    inspector = Inspector(model)
    loss = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.out.parameters(), lr=0.1)
    report = inspector.run_step(optimizer=optimizer, inputs=X, target=Y, loss=loss)
    plain = inspector.run_inspection(X, Y, loss=loss)
    assert report.flow is not None
    assert report.loss == plain.loss == pytest.approx(report.observation.stepped.losses[0])
    assert [v.check for v in report.violations] == ["trained_parameters"]
    healthy = inspector.run_step(optimizer=sgd(model), inputs=X, target=Y, loss=loss)
    assert healthy.healthy, str(healthy)
    frozen = net()
    frozen.into.weight.data.zero_()
    found = Inspector(frozen).run_step(optimizer=sgd(frozen), inputs=X, target=Y, loss=loss)
    assert "initial_weights" in {v.check for v in found.violations}
    optimizers = {"body": sgd(model.into), "head": sgd(model.out)}
    named = inspector.run_step(
        optimizer=optimizers, inputs={"x": X}, target=Y, loss={"a": loss, "b": loss}
    )
    assert named.healthy, str(named)


def test_resuming_a_schedule_needs_it_in_restore() -> None:
    """What moves the rate and is not saved is found; named in `restore` it is saved."""
    model = net()
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0 / (1 + n))

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss = usual(model, optimizer, batch)
        schedule.step()
        return loss

    assert ran(step, model, optimizer, restore=schedule, resume=True).healthy
    assert schedule.last_epoch == 0


def test_overfitting_one_batch() -> None:
    """A step that learns, one that learns too little to tell, one that does not."""
    found = []
    for rate in (1.0, 0.05, 1e-5):
        model = net()
        report = ran(usual, model, sgd(model, rate), overfit=40)
        first, best, call = report.observation.stepped.overfit
        assert first == report.observation.stepped.losses[0]
        assert best < first
        assert call > 30
        found.append(report.verdict)
    assert found == ["healthy", "inconclusive", "unhealthy"]
