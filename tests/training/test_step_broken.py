"""What a step leads to is put back, whatever it is, and what cannot be run is refused."""

from __future__ import annotations

import collections
import gc
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pytest_modelhealth import Inspector
from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.report import HealthReport
from pytest_modelhealth.training.stepping.watching import Call, Watch
from tests.training.steps import usual

COUNT = 0
LOG: list[int] = []


def small() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a small model and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    return model, torch.optim.Adam(model.parameters(), 1e-2)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and classes."""
    return torch.randn(8, 8), torch.randint(0, 3, (8,))


def run_beside(change: Callable[[], Any]) -> HealthReport:
    """Run a step that calls `change`, too."""
    model, optimizer = small()

    def step(model: Any, optimizer: Any, given: Any) -> torch.Tensor:
        change()
        return usual(model, optimizer, given)

    return Inspector(model).run_step(step, optimizer, batch())


def failed(report: HealthReport) -> list[str]:
    """Return the checks that found something."""
    return [violation.check for violation in report.violations]


# ---- put back


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

    run_beside(change)
    assert (number, COUNT) == (0, 0)
    assert hidden is first
    assert (list(bank), counter, kept.n) == ([1, 2], {"a": 2, "b": 1}, 0)
    assert pairs == [{"n": 0}, ({"n": 0},)]
    assert LOG == []
    assert array.tolist() == [1.0] * 3
    assert numbers.random() == np.random.default_rng(0).random()
    assert own.random() == random.Random(0).random()


def test_schedules_in_a_list_and_within_others_are_put_back() -> None:
    """Schedules in a list and within others are put back."""
    model, optimizer = small()
    schedules = torch.optim.lr_scheduler
    parts = [schedules.LinearLR(optimizer, 0.1), schedules.ExponentialLR(optimizer, 0.9)]
    several = [schedules.SequentialLR(optimizer, parts, [4])]

    def step(model: Any, optimizer: Any, given: Any) -> torch.Tensor:
        loss = usual(model, optimizer, given)
        for one in several:
            one.step()
        return loss

    before = [one.last_epoch for one in (*several, *parts)]
    Inspector(model).run_step(step, optimizer, batch())
    assert [one.last_epoch for one in (*several, *parts)] == before


class Wrapper:
    """Holds an optimizer, as look-ahead and sharpness-aware ones do."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = optimizer, optimizer.param_groups

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def step(self) -> None:
        self.inner.step()


def test_the_state_of_a_wrapped_optimizer_is_put_back() -> None:
    """The state of a wrapped optimizer is put back."""
    model, optimizer = small()
    wrapper = Wrapper(optimizer)
    usual(model, wrapper, batch())
    before = {p: (kept, kept["exp_avg"].clone()) for p, kept in optimizer.state.items()}
    Inspector(model).run_step(usual, wrapper, batch())
    for parameter, (kept, average) in before.items():
        assert optimizer.state[parameter] is kept
        assert torch.equal(kept["exp_avg"], average)


def test_hooks_on_parameters_are_put_back() -> None:
    """Hooks on parameters are put back."""
    model, optimizer = small()

    def step(model: Any, optimizer: Any, given: Any) -> torch.Tensor:
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient)
            parameter.register_post_accumulate_grad_hook(lambda _: None)
        return usual(model, optimizer, given)

    Inspector(model).run_step(step, optimizer, batch())
    for parameter in model.parameters():
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks


def test_gradients_that_are_switched_off_for_good_are_found_and_switched_on() -> None:
    """Gradients that are switched off for good are found and switched on."""
    report = run_beside(lambda: None)
    assert report.verdict == "healthy"
    model, optimizer = small()

    def step(model: Any, optimizer: Any, given: Any) -> torch.Tensor:
        loss = usual(model, optimizer, given)
        torch.set_grad_enabled(False)
        return loss

    assert "later_calls" in failed(Inspector(model).run_step(step, optimizer, batch()))
    assert torch.is_grad_enabled()


def test_nothing_of_what_was_seen_is_kept() -> None:
    """Nothing of what was seen is kept."""
    model, optimizer = small()
    # the traceback of an exception that another test let pass may hold some
    others = [one for one in gc.get_objects() if type(one) in (Call, Watch)]
    Inspector(model).run_step(usual, optimizer, batch())
    gc.collect()
    kept = [one for one in gc.get_objects() if type(one) in (Call, Watch)]
    assert {*map(id, kept)} <= {*map(id, others)}


# ---- no false alarm


def test_random_numbers_of_the_first_call_only_are_no_seed() -> None:
    """Random numbers of the first call only are no seed."""
    noise: dict[str, torch.Tensor] = {}
    model, optimizer = small()
    model[2] = nn.Identity()  # type: ignore[operator]

    def step(model: Any, optimizer: Any, given: Any) -> torch.Tensor:
        added = noise.setdefault("first", torch.randn(8, 8)) if not noise else noise["first"]
        return usual(model, optimizer, (given[0] + added, given[1]))

    report = Inspector(model).run_step(step, optimizer, batch())
    assert failed(report) == []


def written(how: str) -> Any:
    """Return a step that writes gradients itself, in place of clearing them."""

    def step(model: Any, optimizer: Any, given: Any) -> torch.Tensor:
        held, loss = list(model.parameters()), F.cross_entropy(model(given[0]), given[1])
        if how == "from autograd":
            gradients = torch.autograd.grad(loss, held)
        else:  # a sum over samples, each by itself
            rows = []
            for x, y in zip(*given, strict=True):
                optimizer.zero_grad()
                F.cross_entropy(model(x[None]), y[None]).backward()
                rows.append([p.grad for p in held])
            gradients = [torch.stack(one).mean(0) for one in zip(*rows, strict=True)]
        for parameter, gradient in zip(held, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        return loss

    return step


@pytest.mark.parametrize("how", ["from autograd", "by sample"])
def test_gradients_that_are_written_need_no_clearing(how: str) -> None:
    """What an optimizer stepped on is told by backward passes, not by what is left."""
    model, _ = small()
    model[2] = nn.Identity()  # type: ignore[operator]
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    assert failed(Inspector(model).run_step(written(how), optimizer, batch())) == []


@pytest.mark.parametrize("kind", [list, dict, collections.deque])
def test_any_container_that_keeps_graphs_is_named(kind: Any) -> None:
    """One that is replaced in each call keeps no more."""
    model, optimizer = small()
    history, last = kind(), [0.0]

    def step(model: Any, optimizer: Any, given: Any) -> torch.Tensor:
        last[0] = loss = usual(model, optimizer, given)
        if kind is dict:
            history[len(history)] = loss
        else:
            history.append(loss)
        return loss

    report = Inspector(model).run_step(step, optimizer, batch())
    assert failed(report) == ["later_calls"]
    assert "history grows by a tensor with its graph" in report.violations[0].message
    assert len(history) == 0


def test_a_part_that_is_trained_every_fifth_call_does_not_fade() -> None:
    """A part that is trained every fifth call does not fade."""
    model = nn.ModuleDict({"large": nn.Linear(8, 32), "small": nn.Linear(8, 3)})
    optimizers = tuple(torch.optim.SGD(model[name].parameters(), 0.1) for name in model)
    calls = 0

    def step(model: Any, optimizers: Any, given: Any) -> torch.Tensor:
        nonlocal calls
        loss = usual(model["small"], optimizers[1], given)
        if calls % 5 == 0:
            optimizers[0].zero_grad()
            model["large"](given[0]).pow(2).mean().backward()
            optimizers[0].step()
        calls += 1
        return loss

    report = Inspector(model).run_step(step, optimizers, batch())
    assert "gradient_path" not in failed(report)


def test_samples_that_the_loss_leaves_out_are_warned_of() -> None:
    """The model runs on all of them: labels may be missing, or not be trusted yet."""
    model, optimizer = small()

    def step(model: Any, optimizer: Any, given: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(given[0])[:4], given[1][:4])
        loss.backward()
        optimizer.step()
        return loss

    report = Inspector(model).run_step(step, optimizer, batch())
    assert report.healthy
    assert [violation.check for violation in report.warnings] == ["batch_influence"]


def test_gradients_that_are_all_zero_are_one_fault() -> None:
    """Gradients that are all zero are one fault."""
    model, optimizer = small()

    def step(model: Any, optimizer: Any, given: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(given[0]), given[1]) * 0.0
        loss.backward()
        optimizer.step()
        return loss

    assert failed(Inspector(model).run_step(step, optimizer, batch())) == ["parameter_updates"]


# ---- refused


def test_a_model_without_values_is_refused() -> None:
    """A model without values is refused."""
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(InspectionError, match=r"0\.weight is lazy"):
        Inspector(lazy).run_step(usual, torch.optim.SGD(lazy.parameters(), 0.1), batch())
    meta = nn.Linear(8, 3, device="meta")
    with pytest.raises(InspectionError, match="weight lies on the meta device"):
        Inspector(meta).run_step(usual, torch.optim.SGD(meta.parameters(), 0.1), batch())


def test_an_iterator_that_runs_out_is_said_to() -> None:
    """An iterator that runs out is said to."""
    model, optimizer = small()
    batches = iter([batch(), batch()])
    report = Inspector(model).run_step(
        lambda model, optimizer, _: usual(model, optimizer, next(batches)), optimizer
    )
    assert "runs out" in report.violations[0].cause
