"""Everything that a training step changes is put back, bit for bit and in place."""

from __future__ import annotations

import collections
import contextlib
import gc
import itertools
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import optimizer as optimizers
from torch.optim.swa_utils import AveragedModel

from pytest_modelhealth import HealthReport, Inspector
from pytest_modelhealth.training.stepping.watching import Call, Watch
from tests.capture.oracle import changes, fingerprint, frozen
from tests.training.steps import X, Y, net, objections, ran, sgd, usual

COUNT = 0
LOG: list[int] = []


class Remembering(nn.Module):
    """Keeps what a forward leaves in every kind of place."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.25)
        self.out = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.count, self.kept, self.by_name = 0, [1.0], {"a": torch.zeros(2)}
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return scores, and remember."""
        self.count += 1
        self.seen += 1
        self.last = x.mean(0)
        self.kept.append(float(x.sum()))
        self.by_name["a"] += 1
        return self.out(self.drop(self.norm(self.into(x)).relu()))


class Scene:
    """A training that leaves traces everywhere, some steps old."""

    def __init__(self, fails: Callable[[], None] = lambda: None) -> None:
        torch.manual_seed(0)
        self.model, self.calls, self.log = Remembering(), 0, ["before"]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
        self.average = AveragedModel(self.model)
        self.fails: Callable[[], None] = lambda: None
        self.step = self.made()
        for _ in range(2):
            self.step(self.model, self.optimizer, (X, Y))
        self.hooks: list[Any] = [self.model.out.register_forward_hook(lambda *_: None)]
        self.hooks.append(self.model.into.weight.register_hook(lambda g: g))
        self.calls, self.fails = 0, fails

    def made(self) -> Callable[[Any, Any, Any], Tensor]:
        """Return a step that closes over all of it."""
        scene, schedule, scaler, average = self, self.schedule, self.scaler, self.average
        log, draws = self.log, torch.Generator().manual_seed(3)
        self.draws = draws

        def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
            scene.calls += 1
            model.train()
            optimizer.zero_grad(set_to_none=False)
            x, y = batch
            x += 0.01 * torch.randn(x.shape, generator=draws)  # of the batch a copy
            random.random(), np.random.rand()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x).float(), y)
            scaler.scale(loss).backward()
            scene.fails()
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            average.update_parameters(model)
            log.append(f"call {scene.calls}")
            model.eval()
            return loss

        return step

    def run(self, batch: Any = (X, Y), **arguments: Any) -> HealthReport:
        """Run the step."""
        rest = self.scaler, self.schedule
        inspector = Inspector(self.model)
        return inspector.run_step(self.step, self.optimizer, batch, restore=rest, **arguments)

    def look(self) -> dict[str, Any]:
        """Return all there is in comparable form, and the identity of what must stay the same."""
        model = self.model
        held = {
            "optimizer": vars(self.optimizer),
            "schedule": self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "torch": {k: v for k, v in vars(optimizers).items() if k.startswith("_global_opt")},
            "log": [*self.log, self.calls, self.draws],
            "same": [id(one) for one in (self.log, model.kept, model.by_name, model.last)],
            "memory": [p.data_ptr() for p in (*model.parameters(), *self.average.parameters())],
        }
        seen = fingerprint(nn.ModuleDict({"model": model, "average": self.average}), ())
        return seen | {name: frozen(value) for name, value in held.items()}


class OwnError(Exception):
    """What a user's step raises."""


def raising(error: BaseException, since: int) -> Callable[[], None]:
    """Return what raises from a call on: an iterator is nothing that is put back."""
    calls = itertools.count(1)

    def fail() -> None:
        if next(calls) >= since:
            raise error

    return fail


def test_everything_is_put_back() -> None:
    """Weights, gradients, state, averages, lists, modes, hooks, schedule, scaler, random numbers.

    A second run says the same, as it begins where the first did.
    """
    scene = Scene()
    before, batch = scene.look(), (X.clone(), Y.clone())
    report = scene.run(batch, overfit=3, resume=True)
    assert changes(before, scene.look()) == []
    assert torch.equal(batch[0], X)
    again = scene.run()
    assert changes(before, scene.look()) == []
    stepped = report.observation.stepped
    assert stepped.losses == again.observation.stepped.losses
    assert stepped.parameters == again.observation.stepped.parameters
    assert len(set(stepped.losses)) == 3
    for hook in scene.hooks:
        hook.remove()
    scene.step(scene.model, scene.optimizer, batch)
    shown = {"model.into:_parameters", "average.module.into:_parameters", "optimizer", "schedule"}
    assert {*shown, "scaler", "log"} <= {*changes(before, scene.look())}  # it would show


@pytest.mark.parametrize(
    ("error", "since"),
    [(OwnError("mine"), 1), *((KeyboardInterrupt(), since) for since in (1, 2, 4))],
)
def test_an_exception_passes_and_leaves_everything_as_it_was(
    error: BaseException, since: int
) -> None:
    """The user's in the first call; Ctrl-C there, later, and in a call on changed weights."""
    scene = Scene(raising(error, since))
    before = scene.look()
    with pytest.raises(type(error)) as caught:
        scene.run()
    assert caught.value is error
    assert changes(before, scene.look()) == []
    scene.fails = lambda: None
    assert scene.run()


def test_what_later_calls_raise_is_a_finding() -> None:
    """Nothing is raised then; the report says so, and all is as it was."""
    scene = Scene(raising(OwnError("later"), 2))
    before = scene.look()
    report = scene.run()
    assert changes(before, scene.look()) == []
    assert "call 2 of the step raises OwnError: later" in str(report)
    assert len(report.observation.stepped.losses) == 1


def test_modes_of_torch_are_put_back() -> None:
    """Deterministic algorithms, anomaly mode and others, whether it comes to its end or not."""

    def modes() -> tuple[Any, ...]:
        checked = torch.is_anomaly_check_nan_enabled()
        found = (torch.get_deterministic_debug_mode(), torch.is_anomaly_enabled(), checked)
        found += (torch.get_num_threads(),)
        found += (torch.get_float32_matmul_precision(), torch.get_default_dtype())
        backends = torch.backends.cuda.matmul, torch.backends.cudnn, torch.backends.mkldnn
        found += tuple(getattr(one, "fp32_precision", "") for one in backends)
        return (*found, torch.backends.cudnn.deterministic, torch.is_grad_enabled())

    before, model, calls = modes(), net(), itertools.count(1)  # which is not put back

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.autograd.set_detect_anomaly(True, check_nan=False)
        torch.set_float32_matmul_precision("high")
        torch.set_default_dtype(torch.float64)
        torch.backends.cudnn.deterministic = True
        torch.set_num_threads(before[3] + 1)
        if next(calls) == 6:
            raise KeyboardInterrupt
        return usual(model, optimizer, batch)

    for _ in range(2):  # stopped, and to its end
        with contextlib.suppress(KeyboardInterrupt):
            Inspector(model).run_step(step, sgd(model), (X, Y))
        assert modes() == before


def test_precision_that_was_set_for_one_backend_is_put_back() -> None:
    """Torch then refuses to tell the precision of all."""
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("this torch has one precision for all backends")

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        matmul.fp32_precision = "ieee"
        return usual(model, optimizer, batch)

    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        ran(step)
        assert matmul.fp32_precision == "tf32"
    finally:
        matmul.fp32_precision = before


def test_what_a_step_freezes_replaces_and_fills_is_put_back() -> None:
    """Flags, ``.data``, groups and modules that the step changes for good."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    held, pointers = list(model.parameters()), [p.data_ptr() for p in model.parameters()]
    keys = set(model.state_dict())

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.into.weight.data = model.into.weight * 0.9
        model.into.bias.requires_grad_(False)
        optimizer.param_groups[0]["lr"] *= 0.5
        model.extra = nn.Linear(2, 2)
        optimizer.add_param_group({"params": list(model.extra.parameters())})
        return loss

    Inspector(model).run_step(step, optimizer, (X, Y))
    assert set(model.state_dict()) == keys
    assert all(a is b for a, b in zip(model.parameters(), held, strict=True))
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert all(p.requires_grad and p.grad is None for p in held)
    assert (len(optimizer.param_groups), optimizer.param_groups[0]["lr"]) == (1, 0.1)
    assert not optimizer.state


def test_what_a_step_leads_to_is_put_back() -> None:
    """Variables that it assigns to, containers of every kind, arrays and generators."""
    number, hidden = 0, torch.zeros(2)
    first = hidden
    bank = collections.deque([1, 2], maxlen=3)
    counter, kept = collections.Counter("aab"), types.SimpleNamespace(n=0)
    pairs: list[Any] = [{"n": 0}, ({"n": 0},)]
    array, numbers, own = np.ones(3), np.random.default_rng(0), random.Random(0)

    def change() -> None:
        nonlocal number, hidden
        global COUNT
        number, hidden, COUNT = number + 1, hidden + 1.0, COUNT + 1
        bank.append(3)
        counter["a"] += 1
        kept.n += 1
        pairs[0]["n"] += 1
        pairs[1][0]["n"] += 1
        LOG.append(1)
        array[:] += numbers.random(3) + own.random()

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        change()
        return usual(model, optimizer, batch)

    ran(step)
    assert (number, COUNT) == (0, 0)
    assert hidden is first
    assert (list(bank), counter, kept.n) == ([1, 2], {"a": 2, "b": 1}, 0)
    assert pairs == [{"n": 0}, ({"n": 0},)]
    assert LOG == []
    assert array.tolist() == [1.0] * 3
    assert numbers.random() == np.random.default_rng(0).random()
    assert own.random() == random.Random(0).random()


class Wrapper:
    """Holds an optimizer, as look-ahead and sharpness-aware ones do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = optimizer, optimizer.param_groups

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def step(self) -> None:
        self.inner.step()


def test_what_lies_within_others_is_put_back() -> None:
    """Schedules in a list and within others, the state of a wrapped optimizer, hooks."""
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    schedules, wrapper = torch.optim.lr_scheduler, Wrapper(optimizer)
    parts = [schedules.LinearLR(optimizer, 0.1), schedules.ExponentialLR(optimizer, 0.9)]
    several = [schedules.SequentialLR(optimizer, parts, [4])]

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient)
            parameter.register_post_accumulate_grad_hook(lambda _: None)
        loss = usual(model, optimizer, batch)
        for one in several:
            one.step()
        return loss

    usual(model, wrapper, (X, Y))
    epochs = [one.last_epoch for one in (*several, *parts)]
    before = {p: (kept, kept["exp_avg"].clone()) for p, kept in optimizer.state.items()}
    ran(step, model, wrapper)
    assert [one.last_epoch for one in (*several, *parts)] == epochs
    for parameter, (kept, average) in before.items():
        assert optimizer.state[parameter] is kept
        assert torch.equal(kept["exp_avg"], average)
    for parameter in model.parameters():
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks


def test_gradients_that_are_switched_off_for_good_are_found_and_switched_on() -> None:
    """A later call of such a step raises, which is a finding."""

    def step(model: Any, optimizer: Any, batch: Any) -> Tensor:
        loss = usual(model, optimizer, batch)
        torch.set_grad_enabled(False)
        return loss

    assert "later_calls" in objections(ran(step))
    assert torch.is_grad_enabled()


def test_nothing_of_what_was_seen_is_kept() -> None:
    """No record of a call outlives the run."""

    def kept() -> set[int]:
        return {id(one) for one in gc.get_objects() if type(one) in (Call, Watch)}

    others = kept()  # the traceback of an exception that another test let pass may hold some
    ran()
    gc.collect()
    assert kept() <= others
