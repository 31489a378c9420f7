"""Exported programs: inspected through their unflattened modules."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corpus.models import exported
from corpus.models.exported import Block, Functions, PreNorm, classifier, ids
from corpus.models.hooked import Nested, x
from pytest_modelhealth import InspectionError, Inspector, ModelHealthError, compare
from pytest_modelhealth.report import Status, Verdict
from tests.capture.oracle import assert_alike, report_of

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
    """Every layer is observed under its name and type, with the model's own numbers.

    Parameters and buffers of the program keep their values, and get no gradient.
    """
    before = {name: tensor.clone() for name, tensor in program.state_dict.items()}
    report = assert_same_layers(program, model)
    assert (report.observation.model_type, report.observation.notes) == ("Nested", ())
    assert all(layer.status is Status.OBSERVED for layer in report)
    for name, tensor in program.state_dict.items():
        assert torch.equal(tensor, before[name]), name
        assert tensor.grad is None


def test_the_flat_module_of_a_program_shows_its_layers(program) -> None:
    """`ExportedProgram.module()` runs no hooks inside: it is run node by node."""
    flat, batch = program.module(), x()
    report = Inspector(flat).run_inspection(batch)
    whole = Inspector(program).run_inspection(batch)
    for name, layer in report.layers.items():
        seen, expected = layer.activations, whole[name].activations
        assert (seen.mean, seen.std, seen.max) == (expected.mean, expected.std, expected.max), name
    assert {"block.0", "stem"} <= set(report.layers)
    assert "without gradients" in str(report)
    with pytest.raises(InspectionError, match="no backward pass"):
        Inspector(flat).run_inspection(batch, backward=True)


def test_weights_that_changed_since_are_shown_as_they_are(program) -> None:
    """An inspector of a flat module is used again after a step of training."""
    flat = program.module()
    inspector = Inspector(flat)

    def norms() -> list[float]:
        report = inspector.run_inspection(x())
        return [one.norm for layer in report for one in layer.parameters.values()]

    before = norms()
    assert len(before) == len(list(flat.parameters()))
    with torch.no_grad():
        for parameter in flat.parameters():
            parameter.mul_(2)
    assert norms() == pytest.approx([2 * norm for norm in before])


def test_a_flat_module_in_training_mode_is_left_as_it_was() -> None:
    """Its graph writes to the buffers of batch norms, and those are put back."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).train()
    flat = torch.export.export(model, (torch.randn(8, 3),)).module()
    before = {name: value.clone() for name, value in flat.state_dict().items()}
    Inspector(flat).run_inspection(torch.randn(8, 3))
    assert all(torch.equal(value, before[name]) for name, value in flat.state_dict().items())


def test_several_batches_unflatten_once(program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unflattening is slow; it is done once for a program."""
    calls = []
    unflatten = torch.export.unflatten
    monkeypatch.setattr(torch.export, "unflatten", lambda p: calls.append(p) or unflatten(p))
    Inspector(program).run_batches([x(), x()])
    assert len(calls) == 1


def test_activations_and_units_of_a_program_are_told_by_the_original_classes() -> None:
    """Units lie in dimension 1 behind a convolution, and an activation module is one layer."""
    model = nn.Sequential(nn.Conv1d(3, 5, 2), nn.Hardswish(), nn.Softmax(dim=1), Functions())
    program = torch.export.export(model.eval(), (torch.randn(4, 3, 8),))
    report = assert_same_layers(program, model, torch.randn(4, 3, 8))
    assert len(report["0"].activations.units.alive) == 5
    assert (report["1"].activation, report["2"].activation) == ("hardswish", "softmax")
    assert [layer.name for layer in report if layer.functional] == ["3.gelu", "3.softmax"]
    watching = Inspector(program).watch(types=nn.Conv1d, what="activations")
    seen = watching.run_inspection(torch.randn(4, 3, 8))
    assert [layer.name for layer in seen if layer.activations is not None] == ["0"]


def assert_same_layers(candidate: Any, model: nn.Module, batch: Tensor | None = None) -> Any:
    """Inspect both and do nothing if they show the same layers and numbers; return the first."""
    batch = x() if batch is None else batch
    report, expected = report_of(candidate, batch), report_of(model, batch)
    assert_alike(report, expected, 1e-6)
    forms = [(e.name, e.activation, e.activations.shape) for e in expected]
    assert [(s.name, s.activation, s.activations.shape) for s in report] == forms
    return report


def lines(**marks: str) -> dict[str, str]:
    """Return the place of the line of the models that has each text, by layer."""
    file = exported.__file__
    written = Path(file).read_text(encoding="utf-8").splitlines()
    return {
        layer: f"{file}:{next(n for n, text in enumerate(written, 1) if mark in text)}"
        for layer, mark in marks.items()
    }


CALLED_AT = {
    "embedding": "hidden = self.embedding(ids)",
    "block.up": "up = self.act(",
    "block.act": "up = self.act(",
    "block.gelu": "gated = F.gelu(up)",
    "norm": "hidden = self.norm(hidden)",
    "head": 'return {"logits"',
}


def variants(model: nn.Module, folder: Path) -> dict[str, Any]:
    """Return what becomes of an exported model."""
    program = torch.export.export(model, (), ids())
    core = program.run_decompositions()
    file, path = io.BytesIO(), folder / "program.pt2"
    torch.export.save(core, file)
    torch.export.save(program, path)
    file.seek(0)
    sizes = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    dynamic = torch.export.export(
        model, (), ids(3, 7), dynamic_shapes={"ids": sizes, "mask": sizes}
    )
    return {
        "as it is": program,
        "strict": torch.export.export(model, (), ids(), strict=True),
        "dynamic": dynamic,
        "draft": torch.export.draft_export(model, (), ids()),
        "core": core,
        "file": str(path),
        "core in bytes": torch.export.load(file),
    }


def test_what_becomes_of_an_exported_program_shows_the_layers_and_lines_of_the_model(
    tmp_path: Path,
) -> None:
    """Decomposed or not, from a file or not: each layer is the model's, and so is its line."""
    model = classifier()
    expected = Inspector(model).run_inspection(ids()).observation
    for kind, program in variants(classifier(), tmp_path).items():
        report = Inspector(program).run_inspection(ids())
        assert report.observation.errors == (), kind
        assert report.verdict is Verdict.HEALTHY, kind
        for name, wanted in expected.layers.items():
            seen = report.observation.layers[name]
            assert seen.calls == wanted.calls, (kind, name)
            assert seen.activations.rms == pytest.approx(wanted.activations.rms, rel=1e-5)
        for layer, place in lines(**CALLED_AT).items():
            assert report.observation.called_at(layer) == place, (kind, layer)
            assert expected.layers[layer].source == place, layer
        result = compare(model, program, ids())
        assert result.equivalent, (kind, result)
        assert result.notes == (), kind


def test_a_culprit_in_a_decomposed_program_is_named_with_its_line() -> None:
    """The line of the call stands in the failure and in the data, once for both sides."""
    broken = classifier()
    with torch.no_grad():
        broken.block.down.weight[0, 0] += 1.0
    program = torch.export.export(broken, (), ids()).run_decompositions()
    result = compare(classifier(), program, ids())
    assert result.first_divergence is not None
    assert result.first_divergence.layer == "block.down"
    place = lines(it="return self.down(x)")["it"]
    assert result.first_divergence.called_at[0] == place
    with pytest.raises(ModelHealthError, match=f"called at: .*:{place.rpartition(':')[2]}"):
        result.assert_equivalent()
    assert result.to_dict()["divergence"]["called_at"][0] == place


def test_a_program_is_in_the_mode_that_its_operators_say() -> None:
    """Those of batch norm and dropout do; other layers have no mode, and none is compared."""
    for training in (False, True):
        model = classifier().train(training)
        program = torch.export.export(model, (), ids())
        report = Inspector(program).run_inspection(ids(), backward=False)
        for name in ("", "norm", "drop"):
            assert report[name].options["training"] is training
        for name in ("head", "block", "block.up"):
            assert "training" not in report[name].options
        other = compare(model.train(not training), program, ids(), backward=False)
        assert other.first_divergence is not None
        assert other.first_divergence.layer == "norm"
        assert "mode" in str(other)


def test_a_module_of_several_names_and_no_parameters_runs() -> None:
    """`torch.export.unflatten` leaves it unfinished where the program was exported strictly."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Block()
            self.again = self.first

        def forward(self, x: Tensor) -> Tensor:
            return self.again(self.first(x))

    model, batch = Shared(), torch.randn(3, 8)
    program = torch.export.export(model, (batch,), strict=True)
    assert compare(model, program, batch).equivalent


def test_files_of_several_programs_and_of_none_are_refused(tmp_path: Path) -> None:
    """The message says what to pass in their place."""
    from torch.export.pt2_archive._package import package_pt2

    model, batch = nn.Linear(2, 2), torch.ones(1, 2)
    program = torch.export.export(model, (batch,))
    path = tmp_path / "two.pt2"
    package_pt2(path, exported_programs={"a": program, "b": program})
    with pytest.raises(InspectionError, match=r"cannot load the exported program in .*two.pt2"):
        Inspector(path)
    (tmp_path / "no.pt2").write_text("no archive")
    with pytest.raises(InspectionError, match=r"it must be one that torch.export.save wrote"):
        Inspector(tmp_path / "no.pt2")
    with pytest.raises(InspectionError, match="there is no file"):
        Inspector(tmp_path / "absent.pt2")
    with pytest.raises(InspectionError, match=r"ONNX files .*exported programs \(\*\.pt2\)"):
        Inspector("weights.safetensors")


def test_a_norm_that_casts_its_input_does_not_give_it_out() -> None:
    """The residual sum reads the block's input, not the cast of it that the norm made."""
    torch.manual_seed(0)
    model, batch = PreNorm(), 5 * torch.randn(4, 6)
    program = torch.export.export(model, (batch,))
    graph = str(program.graph)
    seen = Inspector(program).run_inspection(batch)["norm"].activations
    assert seen.count == 24
    assert seen.max == pytest.approx(model.norm(batch).max().item())
    assert compare(model, program, batch).equivalent
    assert str(program.graph) == graph
