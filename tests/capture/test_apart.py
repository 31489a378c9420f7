"""Inspections that run at the same time are kept apart, or refused."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth import InspectionError, Inspector, compare
from pytest_modelhealth.capture.step import state
from tests.capture.oracle import changes, fingerprint

X = torch.linspace(-1, 1, 24).reshape(4, 6)


class Net(nn.Module):
    """Functional layers, dropout, and statistics that change in training."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, width), nn.BatchNorm1d(width)
        self.last, self.inside = nn.Linear(width, 2), lambda: None

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.first(x)))
        self.inside()
        return self.last(F.dropout(x))


def seen(report: Any) -> dict[str, Any]:
    """Return all that was seen of each layer."""
    return report.to_dict()["layers"]


def run(model: nn.Module, site: str = "", inner: Callable[[], Any] = lambda: None) -> Any:
    """Inspect `model`, and call `inner` at a site."""
    calls = {name: inner if name == site else lambda: None for name in SITES}

    def loss(output: Tensor) -> Tensor:
        calls["loss"]()
        output.register_hook(lambda _: calls["gradient"]())
        return output.square().mean()

    def backward(value: Tensor) -> None:
        value.backward(retain_graph=True)
        calls["backward"]()

    model.inside = calls["forward"]
    handle = model.norm.register_forward_hook(lambda *_: calls["hook"]() and None)
    try:
        torch.manual_seed(3)
        return Inspector(model).run_inspection(X, loss=loss, backward=backward)
    finally:
        model.inside = None
        handle.remove()


SITES = {
    "forward": "comes from its forward, in the layer 'Net'",
    "hook": "comes from its forward, in the layer 'norm'",
    "loss": "comes from its loss",
    "backward": "comes from its backward pass",
    "gradient": "comes from its backward pass",
}


@pytest.mark.parametrize("site", SITES)
def test_a_second_inspection_of_a_model_inside_the_first_is_refused(site: str) -> None:
    """The message says from where it came; the outer run goes on as if nothing had happened."""
    model = Net()
    model.inside = None
    alone, before = seen(run(copy.deepcopy(model))), fingerprint(model, X)
    messages = []

    def inner() -> None:
        for part in (model, model.first):
            with pytest.raises(InspectionError) as refused:
                Inspector(part).run_inspection(X)
            messages.append(str(refused.value))

    assert seen(run(model, site, inner)) == alone
    assert SITES[site] in messages[0]
    assert "one inspection at a time" in messages[1]
    assert [n for n in changes(before, fingerprint(model, X)) if n not in GENERATORS] == []

    with pytest.raises(InspectionError, match="inspected already"):
        run(model, site, lambda: Inspector(model).run_inspection(X))
    assert [n for n in changes(before, fingerprint(model, X)) if n not in GENERATORS] == []
    assert torch._C._len_torch_function_stack() == 0


GENERATORS = ("torch",)  # run() seeds it


@pytest.mark.parametrize("inner", [Inspector(Net()).run_inspection, partial(compare, Net(), Net())])
def test_another_model_inside_is_refused_too(inner: Callable[[Any], Any]) -> None:
    """One inspection runs at a time, whatever it is of."""
    with pytest.raises(InspectionError, match="cannot inspect Net: Net is being inspected already"):
        run(Net(), "loss", lambda: inner(X))


def threaded(*functions: Callable[[], Any]) -> list[Any]:
    """Call the functions in a thread each; return what they return or raise."""
    with ThreadPoolExecutor(len(functions)) as pool:
        futures = [pool.submit(function) for function in functions]
        return [future.exception() or future.result() for future in futures]


def test_one_model_in_two_threads_is_inspected_once_at_a_time() -> None:
    """The one that comes second waits for the first, and both see what each sees alone."""
    model, inside, began = Net(), threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert began.wait(60)
        time.sleep(0.1)

    def second() -> Any:
        assert inside.wait(60)
        began.set()
        return Inspector(model.norm).run_inspection(X)

    expected = [run(copy.deepcopy(model)), Inspector(copy.deepcopy(model.norm)).run_inspection(X)]
    both = threaded(lambda: run(model, "loss", wait), second)
    assert [*map(seen, both)] == [*map(seen, expected)]
    assert not any(module._forward_hooks for module in model.modules())


def test_an_inspection_that_waits_in_vain_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """One inside another's loss, in a thread that the other waits for, is refused in the end."""
    monkeypatch.setattr(state, "_PATIENCE", 0.1)
    model, other = Net(), Net()
    model.inside = other.inside = lambda: None
    errors = []
    inner = partial(threaded, lambda: Inspector(other).run_inspection(X))
    assert run(model, "loss", lambda: errors.extend(inner()))
    assert "an inspection in another thread has not ended" in str(errors[0])


def test_models_in_threads_of_their_own_are_kept_apart() -> None:
    """Two threads see what each sees alone, and leave the generators as they were."""
    models = [nn.Sequential(nn.Linear(6, w), nn.Tanh(), nn.BatchNorm1d(w)) for w in (5, 40)]
    expected = [seen(Inspector(model).run_inspection(X)) for model in models]
    numbers = torch.get_rng_state()

    def many(index: int) -> bool:
        reports = (Inspector(models[index]).run_inspection(X) for _ in range(20))
        return all(seen(report) == expected[index] for report in reports)

    assert threaded(partial(many, 0), partial(many, 1)) == [True, True]
    assert torch.equal(torch.get_rng_state(), numbers)
