"""The recorded flow against the provenance of memory, over every model of the zoo."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from corpus.models.hooked import ZOO, make, seeded
from pytest_modelhealth import Inspector
from pytest_modelhealth.report import Flow, Kind
from tests.capture.architectures import ARCHITECTURES
from tests.capture.oracle import RUN_SEED, call, inspect
from tests.capture.provenance import Edge, provenance

NOT_FOLLOWED = {
    "torch.func": "functorch's wrappers have no memory of their own",
    "compiled, cold": "compiled code shows no modules",
    "compiled, warm": "compiled code shows no modules",
    "script": "scripts take no hooks",
    "script inside": "scripts take no hooks",
    "padded encoder": "nested tensors have no sizes",
    "exotic dtypes": "sparse tensors have no memory of their own",
    "lazy": "lazy parameters have no memory yet",
    "traces itself": "its layers run as a trace, which the oracle sees being made",
    "copies itself": "the copy has the oracle's hooks",
    "returns its parameter": "the flow names the parameter, the oracle the layer that returned it",
}
"""Models that the oracle cannot follow, and why."""

CASES = {name: case for name, case in (ZOO | ARCHITECTURES).items() if name not in NOT_FOLLOWED}

pytestmark = pytest.mark.filterwarnings("ignore")


def leaf_modules(model: nn.Module) -> set[str]:
    """Return the names of the modules that hold no others."""
    return {name for name, module in model.named_modules() if name and not module._modules}


def edges(flow: Flow, leaves: set[str]) -> set[Edge]:
    """Return which of `leaves` feeds which, other layers and operations being passed through."""
    vertices, calls = flow.graph.vertices, flow.graph.calls

    def leaf(number: int) -> str:
        """Return the leaf module that a call was made in; functional layers are inside of one."""
        while number >= 0 and calls[number].layer not in leaves:
            number = calls[number].parent
        return calls[number].layer if number >= 0 else ""

    result = set()
    for target in calls:
        met, todo = set(), list(target.inputs) if target.layer in leaves else []
        while todo:
            vertex = todo.pop()
            if vertex in met:
                continue
            met.add(vertex)
            source = leaf(vertices[vertex].call)
            if source and vertices[vertex].kind is not Kind.UNKNOWN:
                result.add((source, target.layer))
            else:
                todo += vertices[vertex].operands
    return result


@pytest.mark.parametrize("name", CASES)
def test_the_flow_is_what_following_memory_finds(name: str) -> None:
    """Which leaf module feeds which is what every operation's memory tells.

    The one model whose flow is partial says so.
    """
    case = CASES[name]
    model, batch = make(case)
    leaves = leaf_modules(model)
    with case.context(), provenance(model, leaves) as truth:
        seeded(RUN_SEED)
        call(model, batch)
    model, batch = make(case)
    flow = inspect(case, model, batch).flow
    assert flow is not None
    assert flow.is_exact == (name != "encoder layer, evaluated")
    assert edges(flow, leaves) == truth.edges or not flow.is_exact


class InVain(nn.Module):
    """Computes many branches beside the one that it uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.layers = nn.Linear(8, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(24))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            _ = (layer(x) * 2).tanh()
            del _
            ALIVE.append(sum(tensor() is not None for tensor in SAVED))
        return self.used(x).tanh()


SAVED: list[weakref.ref[Tensor]] = []
ALIVE: list[int] = []


def test_branches_computed_in_vain_are_freed_at_once() -> None:
    """Neither a tensor nor a node is held, which would hold what it saved."""
    SAVED.clear()
    ALIVE.clear()

    def pack(tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        SAVED.append(weakref.ref(copy))
        return copy

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        Inspector(InVain()).run_inspection(torch.randn(4, 8))
    assert len(SAVED) >= 48
    assert ALIVE == [0] * 24


class Changing(nn.Module):
    """Two layers, and a change in place of what the first returned."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.change, self.a, self.b = change, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.change(h)
        output: Tensor = self.b(h)
        return output


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda h: None, "b <- a"),
        (lambda h: h.detach_(), "b <- detach"),
        (lambda h: h.detach_().requires_grad_(), "b <- requires_grad(detach)"),
        (lambda h: h.mul_(2), "b <- mul(a)"),
    ],
)
def test_an_output_that_was_changed_is_not_taken_for_what_it_was(
    change: Callable[[Tensor], object], line: str
) -> None:
    """The same tensor may be another vertex by the time the next layer takes it."""
    report = Inspector(Changing(change)).run_inspection(torch.randn(3, 4))
    assert line in str(report.observation.flow).splitlines()
