"""The forms in which people write a step: each runs, and what is measured of it is right."""

from __future__ import annotations

import collections
import copy
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth import HealthReport, Inspector
from pytest_modelhealth.report import SteppedParameter
from pytest_modelhealth.training.stepping.session import Session
from tests.training.steps import X, Y, entropy, net, objections, ran, sgd, usual


def parameter(report: HealthReport, name: str = "into.weight") -> SteppedParameter:
    """Return what was seen of a parameter."""
    return next(p for p in report.observation.stepped.parameters if p.name == name)


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
        assert objections(report) == {}
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
    assert objections(report) == {}
    (seen,) = report.observation.stepped.optimizers
    assert (seen.traits, seen.steps) == ({"closure"}, (1, 1, 1))
    assert report.observation.stepped.slope is None
    (expected,) = torch.autograd.grad(entropy(model, (X, Y)), [model.into.weight])
    assert parameter(report).gradients[0] == pytest.approx(float(expected.norm()), rel=1e-4)


def test_a_gradient_scaler_in_order() -> None:
    """Its scale is removed in `scaler.step`, before the optimizer's own step."""
    model = net()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(batch[0]).float(), batch[1])
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss

    report = ran(step, model, optimizer, restore=scaler)
    assert objections(report) == {}
    found = parameter(report)
    assert found.added[0] > 1000 * found.gradients[0] / 48  # scaled when it was left
    assert found.gradients[0] < 10


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
    assert objections(report) == {}
    stepped = report.observation.stepped
    assert stepped.losses[-1] < stepped.losses[0]
    assert all(any(p.updates) and p.held for p in stepped.parameters)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("every", "calls"), [(4, 4), (2, 3)])
def test_gradients_may_add_up_over_calls(every: int, calls: int) -> None:
    """More calls are made until the optimizer steps, and a count in the closure starts anew."""
    count = [0]

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss = entropy(model, batch)
        (loss / every).backward()
        count[0] += 1
        if count[0] % every == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    for _ in range(2):
        report = ran(step)
        assert report.healthy, str(report)
        steps = report.observation.stepped.optimizers[0].steps
        assert steps == tuple(int((n + 1) % every == 0) for n in range(calls))


def test_an_optimizer_may_step_within_the_backward_pass() -> None:
    """One a parameter, in hooks, which stay; none of them was given to the step but by a tuple."""
    model = net()
    own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def take(parameter: Tensor) -> None:
        own[parameter].step()
        own[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(take)

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
        assert objections(ran(form)) == {}
    assert trainer.calls == 0


class Out:
    """What a library's model returns."""

    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "float": lambda loss: loss.item(),
    "numpy": lambda loss: loss.detach().numpy(),
    "mapping": lambda loss: {"loss": loss, "accuracy": torch.tensor([1.0, 2.0])},
    "losses": lambda loss: {"a": loss / 2, "b": loss.item() / 2},
    "tuple": lambda loss: (loss / 4, 3 * loss / 4),
    "object": Out,
    "one value": lambda loss: loss.reshape(1),
}


@pytest.mark.parametrize("form", FORMS)
def test_losses_of_many_forms(form: str) -> None:
    """All say the same number."""
    report = ran(lambda *given: FORMS[form](usual(*given)))
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
    assert "initial_weights" in objections(found)
    optimizers = {"body": sgd(model.into), "head": sgd(model.out)}
    named = inspector.run_step(
        optimizer=optimizers, inputs={"x": X}, target=Y, loss={"a": loss, "b": loss}
    )
    assert named.healthy, str(named)


def test_resuming_a_schedule_needs_it_in_restore() -> None:
    """What moves the rate is saved where it is named in `restore`."""
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
    verdicts = []
    for rate in (1.0, 0.05, 1e-5):
        model = net()
        report = ran(usual, model, sgd(model, rate), overfit=40)
        first, best, call = report.observation.stepped.overfit
        assert first == report.observation.stepped.losses[0]
        assert best < first
        assert call > 30
        verdicts.append(report.verdict)
    assert verdicts == ["healthy", "inconclusive", "unhealthy"]


# ---- the slope of the loss


def analytic(model: nn.Module) -> float:
    """Return the norm of the gradient by autograd."""
    gradients = torch.autograd.grad(entropy(model, (X, Y)), list(model.parameters()))
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients))


def stepping(scale: float = 1.0, clip: float = math.inf) -> Callable[[Any, Any, Any], Tensor]:
    """Return a step that descends so many times its loss, with gradients of so much length."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = entropy(model, batch)
        (scale * loss).backward()
        if clip < math.inf:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        return loss

    return step


def test_the_slope_is_that_of_autograd() -> None:
    """Gradient norm and slope, each against autograd, clipped too; losses against plain steps."""
    model = net()
    report = ran(usual, model)
    slope = report.observation.stepped.slope
    assert slope.gradient == pytest.approx(analytic(model), rel=1e-5)
    assert slope.slope == pytest.approx(analytic(model), rel=2e-3)
    assert slope.added == pytest.approx(slope.gradient)
    clipped = ran(stepping(clip=0.05), model)
    assert clipped.observation.stepped.slope.factor == pytest.approx(0.05 / slope.added, rel=2e-3)
    assert clipped.observation.stepped.slope.added == pytest.approx(slope.added, rel=1e-4)
    assert objections(clipped) == {}
    assert nn.utils.clip_grad_norm_ is nn.utils.clip_grad.clip_grad_norm_  # which was watched
    optimizer = sgd(model)
    losses = [usual(model, optimizer, (X, Y)).item() for _ in range(3)]
    assert report.observation.stepped.losses == pytest.approx(losses)


@pytest.mark.parametrize(
    ("scale", "settings", "grade"),
    [
        (1024.0, {}, "fail"),
        (64.0, {}, "warn"),
        (64.0, {"max_gradient_factor": 50.0}, "fail"),
        (64.0, {"skip_checks": ["gradient_factor"]}, None),
        (1.2, {}, None),
        (0.25, {}, "warn"),
    ],
)
def test_a_scale_is_the_factor(scale: float, settings: dict[str, Any], grade: str | None) -> None:
    """In the limits it only warns, and near 1 nothing is said."""
    model = net()
    report = ran(stepping(scale), model, sgd(model, 1e-4), settings=settings)
    assert report.observation.stepped.slope.factor == pytest.approx(scale, rel=2e-3)
    assert objections(report).get("gradient_factor") == grade
    found = [v for v in (*report.violations, *report.warnings) if v.check == "gradient_factor"]
    assert all(v.value == pytest.approx(scale, rel=2e-3) for v in found)


def noise(model: Any, optimizer: Any, batch: Any) -> float:
    """Return a loss of noise."""
    usual(model, optimizer, batch)
    with torch.no_grad():
        moved = model.into.weight.sum() * 1e6
    return float(moved.sin() + moved.cos())


def two(model: Any, optimizers: Any, batch: Any) -> Tensor:
    """Descend several losses by several optimizers."""
    return sum(usual(model, one, batch) for one in optimizers)


def later(model: Any, optimizer: Any, batch: Any) -> Tensor:
    """Return the loss of the weights that the step has moved."""
    usual(model, optimizer, batch)
    return entropy(model, batch)


def test_what_cannot_be_measured_is_not_told() -> None:
    """A loss of noise, one of the weights after the step, several losses of several optimizers."""
    model = net()
    apart = sgd(model.into), sgd(model.out)
    for step, optimizers in ((noise, sgd(model)), (later, sgd(model, 1.0)), (two, apart)):
        assert ran(step, model, optimizers).observation.stepped.slope is None


# ---- what corpus and pairs do not say


def test_all_that_keeps_graphs_is_named() -> None:
    """Containers, attributes, sums; one that is replaced in each call keeps no more."""
    queue, nested, last, total = collections.deque[Tensor](), {}, [0.0], torch.zeros(())

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        nonlocal total
        last[0] = loss = usual(model, optimizer, batch)
        queue.append(loss)
        nested.setdefault("losses", []).append(loss)
        vars(model).setdefault("seen", []).append(loss)
        total = total + loss
        return loss

    report = ran(step)
    assert objections(report) == {"later_calls": "fail"}
    names = report.violations[0].message.partition(" grows by the graph of every call")[0]
    assert set(names.split(", ")) == {"queue", "nested", "seen", "total"}
    assert len(queue) == 0


def remembering() -> Callable[[Any, Any, Any], Tensor]:
    """Return a step that draws noise in its first call, and takes it in all."""
    noise: dict[str, Tensor] = {}

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        added = noise["first"] if noise else noise.setdefault("first", torch.randn(X.shape))
        return usual(model, optimizer, (batch[0] + added, batch[1]))

    return step


def cut(model: Any, optimizer: Any, batch: Any) -> Tensor:
    """Take a half of the outputs for the loss: labels may be missing, or not be trusted yet."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(batch[0])[:8], batch[1][:8])
    loss.backward()
    optimizer.step()
    return loss


def test_each_fault_is_said_once_and_what_looks_like_one_is_none() -> None:
    """Random numbers of one call are no seed; where the model ran on all samples, it warns."""
    assert objections(ran(remembering())) == {}
    assert objections(ran(cut)) == {"batch_influence": "warn"}
    assert objections(ran(stepping(0.0))) == {"parameter_updates": "fail"}


class Halved(nn.Module):
    """A model that forgets the second half of its batch, unless it is whole."""

    def __init__(self, is_whole: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.is_whole = is_whole

    def forward(self, x: Tensor) -> Any:
        return (
            self.linear(x.flatten(1))
            if self.is_whole
            else self.linear(x[:4].flatten(1)).repeat(2, 1)
        )


@pytest.mark.parametrize(
    ("is_whole", "clip", "calls"),
    [
        (True, nn.utils.clip_grad_norm_, 5),
        (True, nn.utils.clip_grad_value_, 7),
        (False, nn.utils.clip_grad_norm_, 13),
    ],
)
def test_halves_are_exchanged_only_where_the_gradient_does_not_show_both(
    is_whole: bool, clip: Callable[..., Any], calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calls are saved where a layer is given the batch, and its gradient scaled at most."""
    called: list[Any] = []
    call = Session.call
    monkeypatch.setattr(
        Session, "call", lambda self, *batch: (called.append(batch), call(self, *batch))[1]
    )

    def step(model: Any, optimizer: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        clip(model.parameters(), 0.01)
        optimizer.step()
        return loss

    torch.manual_seed(0)
    model = Halved(is_whole)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = Inspector(model).run_step(step, optimizer, torch.randn(8, 6, 1))
    assert report.observation.stepped.halves == (True, is_whole)
    assert len(called) == calls
