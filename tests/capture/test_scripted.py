"""TorchScript: layers inside scripts and traces, seen from a copy of their code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corpus.models.hooked import Nested, Small, x
from pytest_modelhealth import Inspector
from pytest_modelhealth.report import HealthReport, Status
from tests.capture.oracle import changes, fingerprint, projection

pytestmark = pytest.mark.filterwarnings("ignore")


class Block(nn.Module):
    """Two of these share their code in a script."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.act = nn.Linear(6, 6), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.act(self.lin(x)), x * 2


class Blocks(nn.Module):
    """Tuples, a shared layer, a loop and a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.rest = nn.ModuleList([nn.Linear(6, 6), nn.Tanh()])
        self.never = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, z = self.first(x)
        for _ in range(2):
            y, u = self.second(y + z)
            z = z + u
        if x.shape[0] == 0:
            y = self.never(y)
        for layer in self.rest:
            y = layer(y)
        return y + z


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def inspect(model: nn.Module, batch: Tensor, **options: Any) -> HealthReport:
    """Inspect without an error of ours."""
    report = Inspector(model).run_inspection(batch, **{"loss": projection} | options)
    assert report.observation.errors == ()
    return report


def assert_shows(report: HealthReport, expected: HealthReport) -> None:
    """Do nothing if the modules and their numbers are the same."""
    modules = [layer for layer in expected if not layer.functional]
    assert report.layers.keys() == {layer.name for layer in modules}
    assert report.loss == expected.loss
    for layer in modules:
        seen = report[layer.name]
        assert (seen.status, seen.calls) == (layer.status, layer.calls), layer.name
        assert (seen.type_name, seen.activation) == (layer.type_name, layer.activation)
        for role in ("inputs", "activations", "gradients"):
            ours, theirs = seen.statistics(role), layer.statistics(role)
            if theirs is None:
                assert ours is None, layer.name
                continue
            assert (ours.count, ours.shape) == (theirs.count, theirs.shape), layer.name
            numbers = [theirs.mean, theirs.std, theirs.abs_max]
            assert [ours.mean, ours.std, ours.abs_max] == pytest.approx(numbers, abs=1e-6)
        assert seen.parameter_gradients.keys() == layer.parameter_gradients.keys()


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("build", [Nested, Blocks])
def test_a_script_shows_its_layers(build: Any, loaded: bool, tmp_path: Path) -> None:
    """Names, classes, calls and numbers are the model's, from memory and from a file."""
    model, batch = build(), x()
    script = torch.jit.script(model)
    if loaded:
        torch.jit.save(script, tmp_path / "model.pt")
        script = torch.jit.load(tmp_path / "model.pt")
    report = inspect(script, batch)
    assert_shows(report, inspect(model, batch))
    (note,) = report.observation.notes
    assert "a copy of the script was run" in note


def test_a_trace_shows_its_layers() -> None:
    """So does a trace, as long as each layer returns one tensor."""
    model, batch = Nested(), x()
    trace = torch.jit.trace(model, batch, check_trace=False)
    assert_shows(inspect(trace, batch), inspect(model, batch))


def test_a_trace_that_returns_inner_values_is_opaque() -> None:
    """What such a layer returned cannot be told from what others took from inside it."""
    batch = x()
    trace = torch.jit.trace(Blocks(), batch, check_trace=False)
    report = inspect(trace, batch)
    assert report["first.lin"].status is Status.OBSERVED
    assert report["first"].status is Status.OPAQUE
    assert "its trace returns inner values" in report["first"].reason
    assert report["first"].activations is None


def test_a_layer_without_a_tensor_output_is_opaque() -> None:
    """A list of tensors is not looked into, and that is said."""

    class Splits(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            return [x, x * 2]

    class Joins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.splits = nn.Linear(6, 6), Splits()

        def forward(self, x: Tensor) -> Tensor:
            parts = self.splits(self.lin(x))
            return parts[0] + parts[1]

    report = inspect(torch.jit.script(Joins()), x())
    assert report["splits"].status is Status.OPAQUE
    assert "List[Tensor]" in report["splits"].reason
    assert report["lin"].status is Status.OBSERVED


@pytest.mark.parametrize("trace", [False, True])
def test_a_script_is_left_as_it_was(trace: bool) -> None:
    """Parameters, buffers, gradients and code are untouched; a later run does not see us."""
    model, batch = Nested(), x()
    script = torch.jit.trace(model, batch, check_trace=False) if trace else torch.jit.script(model)
    for parameter in script.parameters():
        parameter.grad = torch.ones_like(parameter)
    code, before = str(script.inlined_graph), fingerprint(script, batch)
    inspect(script, batch)
    assert changes(before, fingerprint(script, batch)) == []
    assert str(script.inlined_graph) == code
    assert "modelhealth" not in code


def test_the_copy_computes_with_the_parameters_of_the_script() -> None:
    """A penalty on the script's own parameters is a part of their gradients."""
    model, batch = Small(), x()
    script = torch.jit.script(model)

    def penalised(of: nn.Module) -> Any:
        return lambda output: projection(output) + sum((p**2).sum() for p in of.parameters())

    seen = inspect(script, batch, loss=penalised(script))["0"].parameter_gradients["weight"]
    expected = inspect(model, batch, loss=penalised(model))["0"].parameter_gradients["weight"]
    assert (seen.mean, seen.std) == pytest.approx((expected.mean, expected.std), rel=1e-6)


def test_a_script_that_cannot_be_saved_is_opaque_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its root and parameters are seen all the same, and a note says why no more."""

    def fails(*args: Any) -> None:
        raise RuntimeError("Could not export Python function call\nand more")

    monkeypatch.setattr(torch.jit, "save", fails)
    report = inspect(torch.jit.script(Small()), x())
    assert report[""].status is Status.OBSERVED
    assert report[""].gradients is not None
    assert report["0"].status is Status.OPAQUE
    assert report["0"].type_name == "Linear"
    assert report["0"].parameter_gradients.keys() == {"weight", "bias"}
    (note,) = report.observation.notes
    assert note.endswith("it cannot be saved: Could not export Python function call")


def test_a_script_inside_a_model_is_opaque() -> None:
    """Only a script as a whole is copied; one inside shows its own inputs and outputs."""
    model = Nested()
    model.block = torch.jit.script(model.block)
    report = inspect(model, x())
    assert report["block"].status is Status.OBSERVED
    assert report["block.0"].status is Status.OPAQUE
    assert "inspected by itself" in report["block.0"].reason
