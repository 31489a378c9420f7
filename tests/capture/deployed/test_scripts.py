"""TorchScript, scripted, traced or frozen: what the operations of its graph show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corpus.models.hooked import Nested, x
from corpus.models.scripted import MAKERS, Blocks, Flow, Net
from pytest_modelhealth import InspectionError, Inspector
from pytest_modelhealth.report import HealthReport, Status
from tests.capture.oracle import changes, fingerprint

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def net() -> nn.Module:
    """A model in evaluation mode."""
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def images() -> Tensor:
    """A batch for it."""
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def inspect(model: nn.Module, *batch: Any) -> HealthReport:
    """Inspect without an error of ours."""
    report = Inspector(model).run_inspection(batch, backward=False)
    assert report.observation.errors == ()
    return report


def assert_alike(ours: Any, theirs: Any, what: object) -> None:
    """Do nothing if two statistics are of the same tensors, but for rounding."""
    assert (ours is None) == (theirs is None), what
    if ours is None:
        return
    assert (ours.count, ours.shape) == (theirs.count, theirs.shape), what
    numbers = [theirs.mean, theirs.std, theirs.min, theirs.max]
    found = [ours.mean, ours.std, ours.min, ours.max]
    assert found == pytest.approx(numbers, rel=1e-4, abs=1e-5), what


@pytest.mark.parametrize("make", ["scripted", "traced", "in a file", "inlined"])
@pytest.mark.parametrize("build", [Nested, Blocks, Net])
def test_a_script_shows_its_layers(build: Any, make: str) -> None:
    """Names, classes, calls, numbers and parameters are the model's."""
    torch.manual_seed(0)
    model, batch = build().eval(), torch.randn(4, 3, 6, 6) if build is Net else x()
    if make == "traced" and build is Nested:
        pytest.skip("its trace is a branch of it")
    expected, report = inspect(model, batch), inspect(MAKERS[make](model, batch), batch)
    assert report.layers.keys() == expected.layers.keys()
    for layer in expected:
        seen = report[layer.name]
        assert (seen.status, seen.calls) == (layer.status, layer.calls), layer.name
        assert (seen.type_name, seen.activation) == (layer.type_name, layer.activation)
        assert_alike(seen.inputs, layer.inputs, (layer.name, "inputs"))
        assert_alike(seen.activations, layer.activations, (layer.name, "activations"))
        assert seen.parameters.keys() == layer.parameters.keys()
    assert any("without gradients" in note for note in report.observation.notes)


@pytest.mark.parametrize("make", [name for name in MAKERS if name[0] in "fo"])
def test_an_operation_of_a_frozen_script_shows_what_its_layer_computes(
    make: str, net: nn.Module, images: Tensor
) -> None:
    """It is named after what it computes, in the order of the graph, and that is said."""
    expected, report = inspect(net, images), inspect(MAKERS[make](net, images), images)
    names = {
        "layer_norm_1": "others.2", "relu": "first.relu", "relu_2": "act", "tanh": "rest.1",
        "softmax": "softmax",
    }  # fmt: skip
    if make == "frozen":
        names |= {"conv2d": "first.bn", "linear_1": "others.0", "linear_4": "head"}
    for ours, theirs in names.items():
        assert_alike(report[ours].activations, expected[theirs].activations, ours)
    assert any("named after what they compute" in note for note in report.observation.notes)


@pytest.mark.parametrize("batch", [torch.arange(8).reshape(2, 4), torch.zeros(3, 2).long()])
@pytest.mark.parametrize("make", ["frozen", "optimised", "scripted"])
def test_branches_and_loops_show_what_ran(make: str, batch: Tensor) -> None:
    """Each round of a loop is a call, and a branch that was not taken calls nothing."""
    torch.manual_seed(0)
    model = Flow().eval()
    expected, report = inspect(model, batch), inspect(MAKERS[make](model, batch), batch)
    names = {
        "embedding": "embedding", "linear": "cell", "linear_1": "step", "linear_2": "yes",
        "linear_3": "no", "tanh": "tanh",
    }  # fmt: skip
    for ours, theirs in (
        names.items() if make == "frozen" else {(name, name) for name in ("", "tanh")}
    ):
        layer, seen = expected[theirs], report[ours]
        assert (seen.status, seen.calls) == (layer.status, layer.calls), ours
        assert_alike(seen.inputs, layer.inputs, (ours, "inputs"))
        assert_alike(seen.activations, layer.activations, (ours, "activations"))


def test_the_script_is_untouched(net: nn.Module, images: Tensor) -> None:
    """Its graph, its outputs and its file are what they were; a second look sees the same.

    So are parameters, buffers, gradients and code; a later run does not see us.
    """
    script, batch = torch.jit.script(Nested()), x()
    for parameter in script.parameters():
        parameter.grad = torch.ones_like(parameter)
    code, before = str(script.inlined_graph), fingerprint(script, batch)
    inspect(script, batch)
    assert changes(before, fingerprint(script, batch)) == []
    assert str(script.inlined_graph) == code
    assert "modelhealth" not in code
    for make in ("frozen", "optimised"):
        script, copy_of_batch = MAKERS[make](net, images), images.clone()
        graph, output = str(script.graph), script(images)
        first, second = inspect(script, images), inspect(script, images)
        assert str(script.graph) == graph
        assert torch.equal(script(images), output)
        assert torch.equal(images, copy_of_batch)
        assert first.to_dict()["layers"] == second.to_dict()["layers"]
    frozen, again = (MAKERS[make](net, images) for make in ("frozen", "frozen, in a file"))
    assert torch.equal(again(images), frozen(images))


def test_a_script_that_writes_to_its_batch_is_shown_what_it_was_given() -> None:
    """Nothing is shown with the value that it has later."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x += 1
            return self.fc(x) + self.fc(x)

    batch = torch.zeros(2, 4)
    report = inspect(MAKERS["frozen"](Writes().eval(), batch), batch)
    assert report[""].statistics("inputs").max == 0
    assert report["linear"].statistics("inputs").min == 1


def test_what_a_frozen_script_does_not_take_is_refused(net: nn.Module, images: Tensor) -> None:
    """A backward pass, as parameters are constants, and a batch that does not fill its inputs.

    What the script raises comes through; left to itself, no backward pass runs.
    """
    inspector = Inspector(MAKERS["frozen"](net, images))
    with pytest.raises(InspectionError, match="there is no backward pass"):
        inspector.run_inspection(images, backward=True)
    with pytest.raises(InspectionError, match="it takes: x"):
        inspector.run_inspection((images, images))
    with pytest.raises(InspectionError, match="missing a required argument: 'x'"):
        inspector.run_inspection({"y": images})
    with pytest.raises(RuntimeError, match="channels"):
        inspector.run_inspection(images[:, :2])
    report = inspector.run_inspection(images)
    assert report["linear"].gradients is None
    assert any("without gradients" in note for note in report.observation.notes)


def test_keywords_and_defaults_are_bound() -> None:
    """A float has a default, which a keyword replaces."""
    batch = torch.arange(8).reshape(2, 4)
    model = Flow().eval()
    script = MAKERS["frozen"](model, batch)
    for keywords in ({}, {"scale": 0.0}):
        expected = model(batch, **keywords)[0]
        seen = Inspector(script).run_inspection({"x": batch} | keywords)["linear_2"].activations
        assert seen is not None
        assert seen.max == pytest.approx(float(expected.max()), abs=1e-6)


def test_an_exception_ends_an_inspection_whole() -> None:
    """Ctrl-C while the script runs, or in the loss; the next inspection sees what a first does."""
    script, batch = torch.jit.script(Nested()), x()
    inspector = Inspector(script)
    first = inspector.run_inspection(batch).to_dict()["layers"]

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        inspector.run_inspection(batch, loss=interrupted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspector._model.runtime, "_function", interrupted)
        with pytest.raises(KeyboardInterrupt):
            inspector.run_inspection(batch)
    assert inspector._model._hooks is None
    assert not inspector._model._forward_hooks
    assert inspector.run_inspection(batch).to_dict()["layers"] == first


def test_a_script_inside_a_model_is_opaque() -> None:
    """Only a script as a whole is read; one inside shows its own inputs and outputs."""
    model = Nested()
    model.block = torch.jit.script(model.block)
    report = Inspector(model).run_inspection(x())
    assert report["block"].status is Status.OBSERVED
    assert report["block.0"].status is Status.OPAQUE
    assert "inspected by itself" in report["block.0"].reason
