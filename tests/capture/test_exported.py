"""Exported programs: inspected through their unflattened modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth import InspectionError, Inspector
from pytest_modelhealth.report import Status
from tests.capture.models import Nested, x
from tests.capture.oracle import projection

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def model() -> nn.Module:
    """Return a model with a block in it."""
    torch.manual_seed(0)
    return Nested()


@pytest.fixture
def program(model: nn.Module) -> torch.export.ExportedProgram:
    """Return the model, exported."""
    return torch.export.export(model, (torch.ones(4, 6),))


def test_layers_of_a_program_are_those_of_its_model(model: nn.Module, program) -> None:
    """Every layer is observed under its name and type, with the model's own numbers."""
    batch = x()
    exported = Inspector(program).run_inspection(batch, loss=projection).observation
    eager = Inspector(model).run_inspection(batch, loss=projection).observation
    assert exported.errors == ()
    assert exported.model_type == eager.model_type == "Nested"
    assert exported.notes == ()
    assert exported.layers.keys() == eager.layers.keys()
    for name, expected in eager.layers.items():
        layer = exported.layers[name]
        assert layer.status is Status.OBSERVED, name
        for role in ("activations", "gradients"):
            seen, wanted = getattr(layer, role), getattr(expected, role)
            assert seen.mean == pytest.approx(wanted.mean, abs=1e-6), (name, role)
            assert seen.abs_max == pytest.approx(wanted.abs_max, abs=1e-6), (name, role)
        assert layer.parameter_gradients.keys() == expected.parameter_gradients.keys()
    assert exported.layers["stem"].type_name == "Linear"
    assert exported.layers["block.1"].type_name == "BatchNorm1d"


def test_a_program_is_left_as_it_was(program) -> None:
    """Parameters and buffers of the program keep their values, and get no gradient."""
    before = {name: tensor.clone() for name, tensor in program.state_dict.items()}
    Inspector(program).run_inspection(x())
    for name, tensor in program.state_dict.items():
        assert torch.equal(tensor, before[name]), name
        assert tensor.grad is None


def test_layers_of_a_program_can_be_watched(program) -> None:
    """Patterns match the layers inside the program."""
    report = Inspector(program).watch("block.*", what="activations").run_inspection(x())
    assert report["block.0"].activations is not None
    assert report["stem"].activations is None


def test_the_flat_module_of_a_program_is_refused(program) -> None:
    """`ExportedProgram.module()` runs no hooks inside; the message says what to pass."""
    with pytest.raises(InspectionError, match="pass the ExportedProgram itself"):
        Inspector(program.module()).run_inspection(x())


def test_several_batches_unflatten_once(program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unflattening is slow; it is done once for a program."""
    calls = []
    unflatten = torch.export.unflatten
    monkeypatch.setattr(torch.export, "unflatten", lambda p: calls.append(p) or unflatten(p))
    Inspector(program).run_batches([x(), x()])
    assert len(calls) == 1


def test_a_program_from_a_file_shows_the_same(model: nn.Module, program, tmp_path: Path) -> None:
    """Layers, names, types and numbers survive `torch.export.save` and `load`."""
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    assert_same_layers(loaded, model)


def test_activations_and_units_of_a_program_are_told_by_the_original_classes() -> None:
    """Units lie in dimension 1 behind a convolution, and an activation module is one layer."""
    model = nn.Sequential(nn.Conv1d(3, 5, 2), nn.Hardswish(), nn.Softmax(dim=1), Functions())
    program = torch.export.export(model.eval(), (torch.randn(4, 3, 8),))
    report = assert_same_layers(program, model, torch.randn(4, 3, 8))
    assert len(report["0"].activations.units.alive) == 5
    assert (report["1"].activation, report["2"].activation) == ("hardswish", "softmax")
    assert [layer.name for layer in report if layer.functional] == ["3.gelu", "3.softmax"]
    seen = (
        Inspector(program)
        .watch(types=nn.Conv1d, what="activations")
        .run_inspection(torch.randn(4, 3, 8))
    )
    assert seen["0"].activations is not None
    assert seen["1"].activations is None


class Functions(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(F.gelu(x), dim=-1)


def assert_same_layers(candidate: Any, model: nn.Module, batch: Tensor | None = None) -> Any:
    """Inspect both and do nothing if they show the same layers and numbers; return the first."""
    batch = x() if batch is None else batch
    report = Inspector(candidate).run_inspection(batch, loss=projection)
    expected = Inspector(model).run_inspection(batch, loss=projection)
    assert report.observation.errors == ()
    assert list(report.layers) == list(expected.layers)
    for layer in expected:
        seen = report[layer.name]
        assert (seen.type_name, seen.activation) == (layer.type_name, layer.activation)
        assert (seen.status, seen.calls) == (layer.status, layer.calls), layer.name
        for role in ("inputs", "activations", "gradients"):
            ours, theirs = seen.statistics(role), layer.statistics(role)
            assert (ours.count, ours.shape) == (theirs.count, theirs.shape)
            numbers = [theirs.mean, theirs.std, theirs.abs_max]
            assert [ours.mean, ours.std, ours.abs_max] == pytest.approx(numbers, abs=1e-6)
    return report
