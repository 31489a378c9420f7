"""Compiled code observed as it runs compiled, and the model's own compiled code left alone."""

from __future__ import annotations

import gc
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from corpus.models.hooked import Nested, Small, x
from pytest_modelhealth import InspectionError, Inspector
from pytest_modelhealth.report import Status
from tests.capture.oracle import assert_alike, changes, fingerprint, report_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

Compile = Callable[[nn.Module, Any], nn.Module]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def block_only(model: nn.Module, backend: Any) -> nn.Module:
    """Compile a part of an eager model."""
    model.block = torch.compile(model.block, backend=backend)
    return model


KINDS: dict[str, Compile] = {
    "wrapped": lambda model, backend: torch.compile(model, backend=backend),
    "in place": lambda model, backend: (model.compile(backend=backend), model)[1],
    "block only": block_only,
    "both": lambda model, backend: torch.compile(block_only(model, backend), backend=backend),
}


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_code_shows_every_layer(kind: str) -> None:
    """Values, gradients, order, names: those of the eager model, seen from within compiled code."""
    batch, backend = x(), CompileCounterWithBackend("aot_eager")
    model = KINDS[kind](Nested(), backend)
    if kind in ("in place", "both"):  # some of them warm: compiling is what takes the time
        model(batch)
    before = backend.frame_count
    report = report_of(model, batch, compiled="observe")
    assert backend.frame_count == before + 1  # the copy, in one graph
    (note,) = report.observation.notes
    assert "values of compiled code" in note
    assert_alike(report, report_of(model, batch), 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_observing_leaves_the_model_and_its_compiled_code_alone(kind: str) -> None:
    """Fingerprint, cached code and gradients are what they were; a later run compiles nothing."""
    batch = x()
    model = KINDS[kind](Nested(), "aot_eager")
    model(batch)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    code = [Nested.forward.__code__, Small.forward.__code__]
    entries = [_debug_get_cache_entry_list(c) for c in code]
    before = fingerprint(model, batch)
    report_of(model, batch, compiled="observe")
    assert changes(before, fingerprint(model, batch)) == []
    gc.collect()
    assert [len(_debug_get_cache_entry_list(c)) for c in code] == [len(e) for e in entries]
    compiled = counters["stats"]["unique_graphs"]
    model(batch)
    assert counters["stats"]["unique_graphs"] == compiled > 1


def test_an_output_that_nothing_uses_is_not_observed() -> None:
    """The compiler drops it; the layer says so instead of showing what was never computed."""

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(6, 2), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.unused(x)
            return self.used(x)

    report = report_of(torch.compile(Unused(), backend="aot_eager"), x(), compiled="observe")
    assert report["used"].status is Status.OBSERVED
    assert report["unused"].status is Status.UNSUPPORTED
    assert "nothing uses it" in report["unused"].reason


@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++"))
    or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="no C++ compiler, or no headers of Python",
)
def test_inductor_shows_every_layer() -> None:
    """The default backend: the eager values up to the rounding of generated code."""
    batch = x()
    model = torch.compile(Nested())
    assert_alike(report_of(model, batch, compiled="observe"), report_of(model, batch), 1e-4)


def test_what_is_not_compiled_cannot_be_observed_compiled() -> None:
    """The message says what to pass."""
    with pytest.raises(InspectionError, match=r"pass torch\.compile\(model\)"):
        Inspector(Small(), compiled="observe")


def test_a_model_that_cannot_be_copied_says_so() -> None:
    """A model that keeps an activation cannot be copied; the message has the way out."""
    model = Small()
    model.kept = model(x())
    with pytest.raises(InspectionError, match="cannot copy the model to compile it anew"):
        report_of(torch.compile(model, backend="eager"), x(), compiled="observe")


def test_layers_of_compiled_code_have_the_lines_that_call_them() -> None:
    """The compiler knows them, and the operators that show a layer were made there."""
    model = Nested()
    expected = Inspector(model).run_inspection(x()).observation
    observation = report_of(
        torch.compile(model, backend="eager"), x(), compiled="observe"
    ).observation
    places = {name: observation.called_at(name) for name in observation.layers if name}
    assert places == {name: expected.called_at(name) for name in places}
    assert all(places.values())


class Interrupted(nn.Module):
    """Breaks the graph inside of a layer, so that one graph serves all layers of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(4, 4), nn.Tanh()

    def forward(self, value: Tensor) -> Tensor:
        value = self.linear(value)
        torch._dynamo.graph_break()
        return self.last(value)


def test_a_graph_may_serve_several_layers() -> None:
    """Its operators are given the number of the layer, and each layer is seen as its own."""
    model = nn.Sequential(Interrupted(), Interrupted(), Interrupted())
    batch = torch.randn(8, 4)
    plain = Inspector(model).run_inspection(batch)
    seen = Inspector(torch.compile(model, backend="eager"), compiled="observe")
    report = seen.run_inspection(batch)
    for name in ("0.linear", "0.last", "1.last", "2.linear", "2.last"):
        ours, theirs = (one[name].statistics("activations") for one in (report, plain))
        assert ours.mean == pytest.approx(theirs.mean, abs=1e-6)
