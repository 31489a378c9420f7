"""TorchScript, scripted, traced or frozen: what the operations of its graph show."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from corpus.models.hooked import Nested, x
from pytest_modelhealth import InspectionError, Inspector
from pytest_modelhealth.report import HealthReport, Status
from tests.capture.oracle import changes, fingerprint

pytestmark = pytest.mark.filterwarnings("ignore")


class Block(nn.Module):
    """A convolution, a batch norm to fold into it, and a function."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(ins, outs, 3, padding=1), nn.BatchNorm2d(outs)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class Net(nn.Module):
    """Writes in place, and has lists, a layer called twice and one without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(3, 4), Block(4, 4)
        self.act = nn.ReLU(inplace=True)
        self.rest = nn.ModuleList([nn.Linear(4, 4), nn.Tanh(), nn.LayerNorm(4)])
        self.others = nn.ModuleList([nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4)])
        self.head = nn.Linear(4, 3, bias=False)
        for norm in (self.first.bn, self.second.bn):
            _give_statistics(norm)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.act(x + self.second(x)).mean((2, 3))
        for layer in self.rest:
            x = layer(x)
        for layer in self.others:
            x = layer(x)
        x[:, 0] = 1.0
        return self.head(self.rest[0](self.rest[0](x))).softmax(-1)


class Flow(nn.Module):
    """Runs layers on conditions, in loops and in lists of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.rnn = nn.LSTM(6, 6, batch_first=True, bidirectional=True)
        self.cell, self.step = nn.Linear(6, 6), nn.Linear(6, 6)
        self.yes, self.no = nn.Linear(6, 2), nn.Linear(6, 2)

    def forward(self, x: Tensor, scale: float = 2.0) -> tuple[Tensor, dict[str, Tensor]]:
        values, (last, _) = self.rnn(self.embedding(x))
        forth, back = values.chunk(2, 2)
        h = torch.zeros_like(forth[:, 0])
        for t in range(x.shape[1]):
            h = torch.tanh(self.cell(h + forth[:, t]))
        for _round in range(x.shape[0]):
            h = self.step(h)
        parts = [h]
        parts.append(back[:, 0] * scale)
        h = torch.stack(parts).sum(0)
        y = self.yes(h) if bool(x.sum() > 0) else self.no(h)
        return y, {"last": last}


def _give_statistics(norm: nn.Module) -> None:
    """Let a batch norm do something that a fold has to keep."""
    with torch.no_grad():
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        norm.weight.normal_()
        norm.bias.normal_()


def loaded(script: nn.Module) -> nn.Module:
    """Return what a file has of a script."""
    file = io.BytesIO()
    torch.jit.save(script, file)
    file.seek(0)
    return torch.jit.load(file)


def inlined(model: nn.Module, batch: Tensor) -> nn.Module:
    """Put the code of all layers into the graph of a script, which keeps its parameters.

    A script that was loaded shares its graph with no other.
    """
    script = loaded(torch.jit.script(model))
    torch._C._jit_pass_inline(script.graph)
    return script


def trace(model: nn.Module, batch: Tensor) -> nn.Module:
    """Trace a model."""
    return torch.jit.trace(model, batch, check_trace=False, strict=False)


MAKERS: dict[str, Callable[[nn.Module, Tensor], nn.Module]] = {
    "scripted": lambda model, _: torch.jit.script(model),
    "traced": trace,
    "in a file": lambda model, _: loaded(torch.jit.script(model)),
    "inlined": inlined,
    "frozen": lambda model, _: torch.jit.freeze(torch.jit.script(model)),
    "frozen, traced": lambda model, batch: torch.jit.freeze(trace(model, batch)),
    "optimised": lambda model, _: torch.jit.optimize_for_inference(torch.jit.script(model)),
    "optimised, traced": lambda model, batch: torch.jit.optimize_for_inference(trace(model, batch)),
    "frozen, in a file": lambda model, _: loaded(torch.jit.freeze(torch.jit.script(model))),
}
"""What becomes of a model."""


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


class TwoOutputs(nn.Module):
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
        self.first, self.second = TwoOutputs(), TwoOutputs()
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
