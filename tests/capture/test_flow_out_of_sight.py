"""What the flow cannot follow: it says so, and the verdict is what it would be without a flow."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

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
from pytest_modelhealth.report import Flow


def report_of(model: nn.Module) -> HealthReport:
    """Return the report on a batch of its own."""
    torch.manual_seed(1)
    return Inspector(model).run_inspection(torch.randn(16, 8))


def flow_of(model: nn.Module) -> Flow:
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
    flow = flow_of(kind())
    assert flow.producers("b") == fed
    assert len(flow.notes) == notes
    assert "output" in flow.reach("a")


@pytest.mark.parametrize("kind", [Long, LongAfterwards, Threaded])
def test_a_flow_with_a_gap_is_no_flow(kind: type[Layers], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it would deny ways that there are it holds a note alone."""
    monkeypatch.setattr(rows, "MOST_VERTICES", 100)
    flow = flow_of(kind())
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
    shown = str(flow_of(Forces())).replace("tanh_backward", "").replace("requires_grad", "")
    assert "grad" not in shown
    monkeypatch.setattr(recorder, "_is_elsewhere", lambda tensor: True)
    flow = flow_of(Forces())
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


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is that of Linux")
def test_the_graph_of_a_long_loop_is_freed() -> None:
    """Such a graph overflows the stack of the thread that frees it: a process of its own shows.

    Its stack is a quarter of the usual, and the loop a quarter of what overflows that.
    """
    command = ["bash", "-c", 'ulimit -s 2048; exec "$0" -c "$1"', sys.executable, DEEP]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
