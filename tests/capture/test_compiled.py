"""Compiled code as a comparison sees it, and the model's own compiled code left alone."""

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
from pytest_modelhealth import InspectionError, compare
from pytest_modelhealth.capture import Request
from pytest_modelhealth.capture.compiled import CompiledEngine
from pytest_modelhealth.report import Observation
from tests.capture.oracle import changes, fingerprint, projection, report_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

Compile = Callable[[nn.Module, Any], nn.Module]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def block_only(model: nn.Module, backend: Any) -> nn.Module:
    """Compile a part of an eager model."""
    model.block = torch.compile(model.block, backend=backend)
    return model


def observed(model: nn.Module, batch: Tensor) -> Observation:
    """Return what a comparison sees of a compiled model."""
    seen = CompiledEngine().run(Request(model, batch, loss=projection))
    assert seen.errors == ()
    return seen


def assert_same_values(
    seen: Observation, model: nn.Module, batch: Tensor, tolerance: float
) -> None:
    """Do nothing if every module shows the values and gradients that it has when run eagerly."""
    for name, layer in report_of(model, batch).layers.items():
        for role in ("activations", "gradients") if not layer.functional else ():
            ours, theirs = seen.layers[name].statistics(role), layer.statistics(role)
            assert ours.mean == pytest.approx(theirs.mean, abs=tolerance), (name, role)
            assert ours.rms == pytest.approx(theirs.rms, abs=tolerance), (name, role)


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
    seen = observed(model, batch)
    assert backend.frame_count == before + 1  # the copy, in one graph
    assert_same_values(seen, model, batch, 1e-6)


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
    observed(model, batch)
    assert changes(before, fingerprint(model, batch)) == []
    gc.collect()
    assert [len(_debug_get_cache_entry_list(c)) for c in code] == [len(e) for e in entries]
    compiled = counters["stats"]["unique_graphs"]
    model(batch)
    assert counters["stats"]["unique_graphs"] == compiled > 1


def test_an_output_that_nothing_uses_is_not_observed() -> None:
    """The compiler drops it, and a comparison says which layer shows nothing and goes on."""

    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(6, 2), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            self.unused(x)
            return self.used(x)

    model = Unused()
    result = compare(model, torch.compile(model, backend="aot_eager"), x())
    assert result.equivalent
    assert "unused" in str(result)


@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++"))
    or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="no C++ compiler, or no headers of Python",
)
def test_inductor_shows_every_layer() -> None:
    """The default backend: the eager values up to the rounding of generated code."""
    batch = x()
    model = torch.compile(Nested())
    assert_same_values(observed(model, batch), model, batch, 1e-4)


def test_a_model_that_cannot_be_copied_says_so() -> None:
    """A model that keeps an activation cannot be copied; the message has the way out."""
    model = Small()
    model.kept = model(x())
    with pytest.raises(InspectionError, match="cannot copy the model to compile it anew"):
        compare(Small(), torch.compile(model, backend="eager"), x())


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
    assert_same_values(observed(torch.compile(model, backend="eager"), batch), model, batch, 1e-6)
