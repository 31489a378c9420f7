"""Exported programs: inspected through their unflattened modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pytest_modelhealth import InspectionError, Inspector
from pytest_modelhealth.report import Status
from tests.capture.models import Nested, Small, x
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
    (note,) = exported.notes
    assert "functional layers are not seen" in note
    for name, expected in eager.layers.items():
        if expected.functional:
            continue
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


def test_scripted_and_exported_kinds_are_told_apart() -> None:
    """A script's inner layers are opaque, with the reason; its parameters are not."""
    report = Inspector(torch.jit.script(Small())).run_inspection(x())
    assert report[""].status is Status.OBSERVED
    assert report[""].gradients is not None
    assert report["0"].status is Status.OPAQUE
    assert "TorchScript" in report["0"].reason
    assert report["0"].type_name == "Linear"
    assert report["0"].parameter_gradients.keys() == {"weight", "bias"}
