"""The recorded flow against the provenance of memory, and what it follows or cannot follow."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from corpus.models import leaving
from corpus.models.hooked import ZOO, make, seeded
from corpus.models.leaving import FORWARDS, Forward, Two, logged
from corpus.models.out_of_sight import (
    Catching,
    Forces,
    Layers,
    Long,
    LongAfterwards,
    Returning,
    Scripted,
    ScriptedWithoutGradients,
    Threaded,
    Vmapped,
    VmappedWithoutGradients,
)
from pytest_modelhealth import HealthReport, Inspector
from pytest_modelhealth.capture.observing.flow import recorder, rows
from pytest_modelhealth.checks import default_settings
from pytest_modelhealth.checks.judging import judge
from pytest_modelhealth.rendering import renderer
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


@pytest.mark.filterwarnings("ignore")
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
        (lambda h: h.detach_().requires_grad_(), "b <- detach by requires_grad"),
        (lambda h: h.mul_(2), "b <- a by mul"),
    ],
)
def test_an_output_that_was_changed_is_not_taken_for_what_it_was(
    change: Callable[[Tensor], object], line: str
) -> None:
    """The same tensor may be another vertex by the time the next layer takes it."""
    report = Inspector(Changing(change)).run_inspection(torch.randn(3, 4))
    assert line in str(report.observation.flow).splitlines()


# ---- values that leave for Python or NumPy and come back -----------------------------------------


def flow_of(forward: Forward) -> Flow:
    """Return the flow of a run."""
    flow = Inspector(Two(forward)).run_inspection(torch.randn(16, 8)).flow
    assert flow is not None
    return flow


@pytest.mark.filterwarnings("ignore")  # torch and NumPy warn of most of these
@pytest.mark.parametrize("name", FORWARDS)
def test_values_that_come_back_are_followed(name: str) -> None:
    """The cut is what took them out; that tensors made afterwards are of them is noted."""
    forward, operation, is_exact = FORWARDS[name]
    flow = flow_of(forward)
    (cut,) = flow.cut_between("a")
    assert (cut.operation, flow.is_exact) == (operation, is_exact)
    assert leaving.__file__ in cut.line


def test_reading_alone_is_no_way() -> None:
    """A number for a log or a branch feeds nothing."""
    flow = flow_of(logged)
    assert flow.is_exact
    assert not flow.cut_between("a")
    read = [v.name for v in flow.graph.vertices if v.name in ("item", "bool")]
    assert read == ["item", "item"]
    assert flow.consumers("a") == ("b",)


# ---- what cannot be followed ---------------------------------------------------------------------


def report_of(model: nn.Module) -> HealthReport:
    """Return the report on a batch of its own."""
    torch.manual_seed(1)
    return Inspector(model).run_inspection(torch.randn(16, 8))


def flow_through(model: nn.Module) -> Flow:
    """Return the flow of a run."""
    flow = report_of(model).flow
    assert flow is not None
    return flow


@pytest.mark.parametrize(
    ("kind", "fed", "notes"),
    [
        (Vmapped, ("a",), 0),
        (VmappedWithoutGradients, ("tensor",), 1),
        (Scripted, ("input 0",), 0),
        (ScriptedWithoutGradients, ("input 0",), 1),
        (Catching, ("a",), 0),
        (Returning, ("a",), 0),
    ],
)
def test_what_is_out_of_sight_is_followed_or_noted(
    kind: type[Layers], fed: tuple[str, ...], notes: int
) -> None:
    """No way is denied: what nothing shows may come of all before it."""
    flow = flow_through(kind())
    assert flow.producers("b") == fed
    assert len(flow.notes) == notes
    assert "output" in flow.reach("a")


@pytest.mark.parametrize("kind", [Long, LongAfterwards, Threaded])
def test_a_flow_with_a_gap_is_no_flow(kind: type[Layers], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it would deny ways that there are it holds a note alone."""
    monkeypatch.setattr(rows, "MOST_VERTICES", 100)
    flow = flow_through(kind())
    assert not flow.graph.vertices
    assert "not recorded" in flow.notes[0]


class Unexpected(Tensor):
    """A tensor that raises when it is asked what no code of torch asks of it."""

    @property
    def output_nr(self) -> int:
        raise RuntimeError("ours")


class Asked(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x).as_subclass(Unexpected)).as_subclass(Tensor))


def test_an_error_of_ours_costs_the_flow_alone() -> None:
    """It is a note, and never the user's."""
    report = report_of(Asked())
    assert report.flow is not None
    assert report.flow.notes == (
        "not recorded: an error in pytest-modelhealth: RuntimeError: ours",
    )
    assert report.healthy


KINDS = (Vmapped, VmappedWithoutGradients, Scripted, ScriptedWithoutGradients, Threaded, Catching)


@pytest.mark.parametrize("kind", [*KINDS, Returning, Forces])
def test_the_verdict_is_no_worse_than_without_a_flow(kind: type[Layers]) -> None:
    """A flow that is partial or left out adds no violation."""
    seen = report_of(kind())
    unseen = replace(seen.observation, flow=None)
    without = HealthReport(unseen, default_settings(), judge, renderer=renderer)
    found, expected = ({(v.check, v.layer) for v in r.violations} for r in (seen, without))
    assert found <= expected


def test_gradients_made_in_another_thread_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off the CPU a second derivative's numbers are another counter's: its call is one vertex."""
    shown = str(flow_through(Forces())).replace("tanh_backward", "").replace("requires_grad", "")
    assert "grad" not in shown
    monkeypatch.setattr(recorder, "_is_elsewhere", lambda tensor: True)
    flow = flow_through(Forces())
    assert set(flow.producers("c")) == {"b", "input 0"}
    assert [one.name for one in flow.operations("b", "c")] == ["sum", "grad"]
    assert "c" in flow.reach("b", by="gradient")


DEEP = """
import torch
from torch import nn
from pytest_modelhealth import Inspector

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        x = self.fc(x)
        for _ in range(20_000):
            x = x * 1.000001
        return x

report = Inspector(Deep()).run_inspection(torch.randn(8, 4))
assert report.healthy and report.flow.is_exact, report
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is that of Linux")
def test_the_graph_of_a_long_loop_is_freed() -> None:
    """Such a graph overflows the stack of the thread that frees it: a process of its own shows.

    Its stack is a quarter of the usual, and the loop a quarter of what overflows that.
    """
    command = ["bash", "-c", 'ulimit -s 2048; exec "$0" -c "$1"', sys.executable, DEEP]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
