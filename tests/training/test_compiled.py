"""Compiled models are left alone: nothing is compiled anew, no graph breaks, no number changes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

from pytest_modelhealth import Inspector
from pytest_modelhealth.report import Status
from tests.training.models import batch, values

pytestmark = [
    pytest.mark.slow,
    # dynamo's own, of a function that is given what is no leaf
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

HIDDEN: list[Callable[[Tensor], Tensor]] = []
OPAQUE, OBSERVED = Status.OPAQUE, Status.OBSERVED


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layer(x))


class Hidden(Block):
    def forward(self, x: Tensor) -> Tensor:
        return HIDDEN[0](self.layer(x))


class Net(nn.Module):
    def __init__(self, block: type[Block] = Block) -> None:
        super().__init__()
        self.block, self.head = block(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(x))


def compiled(target: Any) -> Any:
    """Return what `torch.compile` makes of a module or function; a break in its graph raises."""
    return torch.compile(target, backend="aot_eager", fullgraph=True)


def in_place(model: Net) -> tuple[Any, Any]:
    """The module compiles itself."""
    model.compile(backend="aot_eager", fullgraph=True)
    return model, model


def part(model: Net, attribute: str) -> tuple[Any, Any]:
    """A part is compiled, or its forward, around which its hooks lie."""
    holder, name = (model.block, "forward") if attribute else (model, "block")
    setattr(holder, name, compiled(getattr(holder, name)))
    return model, model


def function(model: Net) -> tuple[Any, Any]:
    """A forward calls a compiled function that nothing leads to."""
    model.block.__class__ = Hidden
    HIDDEN[:] = [compiled(lambda x: F.relu(x) * 2)]
    return model, model


WAYS: dict[str, tuple[Callable[[Net], tuple[Any, Any]], Status, Status]] = {
    "the monitor is given the compiled": (lambda m: (compiled(m),) * 2, OPAQUE, OPAQUE),
    "in place": (in_place, OPAQUE, OPAQUE),
    "the loop alone runs it": (lambda m: (m, compiled(m)), OPAQUE, OPAQUE),
    "a function calls it": (lambda m: (m, compiled(lambda x: m(x) * 1.0)), OPAQUE, OPAQUE),
    "a part": (lambda m: part(m, ""), OBSERVED, OPAQUE),
    "the forward of a part": (lambda m: part(m, "forward"), OBSERVED, OPAQUE),
    "a function that is called": (function, OBSERVED, OBSERVED),
}
"""What makes the monitored model and what the loop calls; how its block is seen, and a layer in it.

The head beside it is as the block.
"""


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Begin and end without what other tests compiled."""
    HIDDEN.clear()
    gc.collect()
    torch._dynamo.reset()
    yield
    HIDDEN.clear()
    torch._dynamo.reset()


def run(
    compile_: Callable[[Net], tuple[Any, Any]],
    is_monitored: bool,
    stepping: Callable[[torch.optim.Optimizer], Callable[[], object]] = lambda one: one.step,
) -> tuple[Any, ...]:
    """Train a compiled model; return its values, what was compiled, and the monitor."""
    torch._dynamo.reset()
    counters.clear()
    gc.collect()
    torch.manual_seed(0)
    model, call = compile_(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    take = stepping(optimizer)
    monitor = Inspector(model).monitor(every=2)
    if is_monitored:
        monitor.start()
    for step in range(5):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(call(x), y)
        loss.backward()
        take()
        if is_monitored:
            monitor.step_end(step, loss=loss)
    monitor.close()
    stats = counters["stats"]["unique_graphs"], dict(counters["graph_break"])
    return values(model), stats, monitor


@pytest.mark.parametrize("way", WAYS)
def test_compiled_code_is_left_alone(way: str) -> None:
    """Parameters, gradients, updates and the loss are seen, and what lies around compiled code."""
    compile_, block, layer = WAYS[way]
    bare, compiled_then, _ = run(compile_, False)
    seen, compiled_now, monitor = run(compile_, True)
    assert seen == bare
    assert compiled_now == compiled_then
    report, row = monitor.report, monitor.latest
    assert report.observation.errors == ()
    assert "functional layers were not looked at" in report.observation.notes[0]
    statuses = [report[name].status for name in ("block", "block.layer", "head")]
    assert statuses == [block, layer, block]
    for name in ("block.layer", "head"):
        assert row[name, "parameter_gradient_norm"] > 0
        assert row[name, "update_ratio"] > 0
    assert row.loss is not None
    if OPAQUE in statuses:
        assert "compiled code" in report["block.layer"].reason
    if way in ("the monitor is given the compiled", "the loop alone runs it"):
        assert report[""].activations is not None
        assert report[""].gradients is not None


def test_an_optimizer_whose_step_is_compiled_is_left_alone() -> None:
    """Its updates are not seen, and a note says so."""

    def stepping(optimizer: torch.optim.Optimizer) -> Callable[[], object]:
        return torch.compile(optimizer.step, backend="aot_eager")  # type: ignore[no-any-return]

    bare, compiled_then, _ = run(lambda model: (model, model), False, stepping)
    seen, compiled_now, monitor = run(lambda model: (model, model), True, stepping)
    assert (seen, compiled_now) == (bare, compiled_then)
    assert "the step of an optimizer is compiled" in monitor.report.observation.notes[-1]
    assert monitor.latest["head", "parameter_gradient_norm"] > 0
