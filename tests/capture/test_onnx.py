"""ONNX models: each layer is seen as onnxruntime computes it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pytest_modelhealth import InspectionError, Inspector, LayerNotFoundError, compare
from pytest_modelhealth.report import Status

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.filterwarnings("ignore")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x))) + x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 12))
        self.stem = nn.Conv2d(1, 4, 3)
        self.blocks = nn.Sequential(Block(), Block())
        self.fc = nn.Linear(4, 12)
        self.mix = nn.Linear(12, 12)
        self.act = nn.GELU()
        self.norm = nn.LayerNorm(12)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = self.fc(self.blocks(self.stem(x)).mean((2, 3))) * self.scale
        x = self.norm(self.mix(self.act(self.mix(x))))
        return {"logits": F.silu(x), "norm": x}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """A model whose batch norms have seen data."""
    torch.manual_seed(0)
    made = Net()
    made(torch.randn(32, 1, 8, 8))
    return made.eval()


@pytest.fixture(scope="module")
def x() -> Tensor:
    """A batch."""
    return torch.randn(40, 1, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def path(model: nn.Module, x: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in a file, with its weights in another beside it, for batches of any size."""
    file = tmp_path_factory.mktemp("onnx") / "model.onnx"
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    torch.onnx.export(model, (x,), file, dynamo=True, verbose=False, dynamic_shapes=shapes)
    return file


@pytest.fixture(scope="module")
def old(model: nn.Module, x: Tensor, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model in a file of the exporter that writes no metadata."""
    file = tmp_path_factory.mktemp("onnx") / "old.onnx"
    torch.onnx.export(model, (x,), file, dynamo=False)
    return file


def proto_of(path: Path) -> Any:
    """Return a model that may be edited."""
    return onnx.load(path)


def node_of(proto: Any, operator: str, number: int = 0) -> Any:
    """Return one node of a model by its operator."""
    return [node for node in proto.graph.node if node.op_type == operator][number]


def test_each_layer_has_the_statistics_of_the_eager_model(model, x, path, old):
    """What hooks see of the eager model, in float64, is what is seen of both files.

    A batch norm is folded into the convolution before it, whose own output exists no longer.
    """
    calls: dict[str, list[np.ndarray]] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(
            lambda _, __, out, name=name: calls.setdefault(name, []).append(
                np.stack([o.numpy() for o in out.values()])
                if isinstance(out, dict)
                else out.detach().numpy().astype(np.float64)
            )
        )
    with torch.no_grad():
        model(x)
    for module in model.modules():
        module._forward_hooks.clear()
    expected = {name: np.concatenate([o.ravel() for o in outs]) for name, outs in calls.items()}
    for file in (path, old):
        report = Inspector(file).run_inspection(x)
        seen = {name for name, layer in report.layers.items() if not layer.functional}
        assert seen - {"blocks.0.bn", "blocks.1.bn"} >= set(expected) - {
            f"blocks.{n}.{own}" for n in range(2) for own in ("conv", "bn")
        }
        for name in seen & set(expected):
            folded = file is old and name.endswith("conv")
            values = expected[name.replace("conv", "bn") if folded else name]
            statistics = report[name].activations
            assert statistics.count == values.size, (file, name)
            assert statistics.mean == pytest.approx(values.mean(), rel=1e-4, abs=1e-6)
            assert statistics.std == pytest.approx(values.std(), rel=1e-4)
            assert statistics.max == pytest.approx(values.max(), rel=1e-4)
        assert report["mix"].calls == 2
        assert report["blocks.0.relu"].functional
        assert all(layer.status is Status.OBSERVED for layer in report.layers.values())
        assert report.healthy, str(report)
    report = Inspector(path).run_inspection(x)
    assert report["mix"].source.startswith(__file__)
    assert report["fc"].type_name == "Linear"
    assert set(report["fc"].parameters) == {"weight", "bias"}
    assert set(report[""].parameters) == {"scale"}
    assert report.flow.producers("act") == ("mix",)
    assert report.flow.producers("blocks.0.relu") == ("blocks.0.bn",)
    assert report.flow.consumers("stem") == ("blocks.0.bn", "blocks.1.bn", "fc")


def test_what_the_session_holds_is_looked_at_and_not_changed(model, x, path):
    """A session of a file has its graph; one without a graph shows its outputs, and says so."""
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    session = onnxruntime.InferenceSession(path)
    report = Inspector(session).watch("blocks.*").run_batches([x[:24], x[24:], x[:3]])
    assert "blocks.1.bn" in report.layers
    proto = proto_of(path)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    assert len(Inspector(session).run_inspection(x).layers) > 10
    session._model_bytes = None
    report = Inspector(session).run_inspection(x)
    assert list(report.layers) == [""]
    assert "inputs and outputs alone are seen" in str(report)
    assert compare(model, session, x).equivalent
    assert before == {file.name: file.read_bytes() for file in path.parent.iterdir()}


def edited(path: Path, edit: str) -> Any:
    """Return the model with one edit of its graph."""
    proto = proto_of(path)
    if edit == "weights":
        bias = next(one for one in proto.graph.initializer if one.name == "fc.bias")
        values = onnx.numpy_helper.to_array(bias) + np.float32(0.01)
        bias.CopyFrom(onnx.numpy_helper.from_array(values, bias.name))
    elif edit == "epsilon":
        norm = node_of(proto, "LayerNormalization")
        next(a for a in norm.attribute if a.name == "epsilon").f = 1e-2
    elif edit == "operator":
        gelu = node_of(proto, "Gelu")
        next(a for a in gelu.attribute if a.name == "approximate").s = b"tanh"
    elif edit == "residual":
        add = node_of(proto, "Add", 1)
        node_of(proto, "ReduceMean").input[0] = add.input[0]
    return proto


@pytest.mark.parametrize(
    ("edit", "layer"),
    [
        ("", None),
        ("weights", "fc"),
        ("epsilon", "norm"),
        ("operator", "act"),
        ("residual", "blocks.1"),
    ],
)
def test_the_first_layer_that_an_edit_changes_is_named(model, x, path, edit, layer):
    """Without one the model is equivalent."""
    comparison = compare(model, edited(path, edit), x)
    found = None if comparison.equivalent else comparison.first_divergence.layer
    assert found == layer, str(comparison)


def test_a_folded_convolution_is_no_remark(model, x, path):
    """It is gone, and what it gave is compared behind the batch norm; nothing else is to say."""
    comparison = compare(model, path, x)
    assert [note for note in comparison.notes if "onnxruntime" not in note] == []


def test_the_way_to_onnxruntime_is_no_code_of_the_model(path, x):
    """Its operations were named as what became of the user's code."""
    flow = Inspector(path).run_inspection(x).flow
    functions = {operation.name for operation in flow.own_operations("")}
    assert functions
    assert not functions & {"detach", "cpu", "numpy"}


def test_a_loaded_model_runs_where_it_came_from(path, x):
    """A replay and a copy inspect the stand-ins, and see the functional layers as well."""
    first = Inspector(path)
    again = Inspector(copy.deepcopy(first._model))
    layers = [list(one.run_inspection(x).layers) for one in (first, again)]
    assert layers[0] == layers[1]


def test_a_loss_of_the_nested_output_is_left_out_where_there_is_none(model, x, path):
    """ONNX returns tensors in a row, which the user's loss was not written for."""
    comparison = compare(model, path, x, loss=lambda output: output["logits"].sum())
    assert comparison.equivalent, str(comparison)
    assert comparison.losses[1] is None


def test_a_deployed_model_gets_a_verdict(path, x):
    """Dead units behind a folded batch norm, and a NaN, where they begin."""
    proto = proto_of(path)
    for name, value in (("blocks.0.conv.bias", -1e3), ("norm.bias", float("nan"))):
        held = next(one for one in proto.graph.initializer if one.name == name)
        values = np.full_like(onnx.numpy_helper.to_array(held), value)
        held.CopyFrom(onnx.numpy_helper.from_array(values, name))
    report = Inspector(proto).run_inspection(x)
    found = {(violation.layer, violation.check) for violation in report.violations}
    assert ("blocks.0.relu", "dead_units") in found
    assert ("norm", "finite") in found


def test_a_graph_without_metadata_has_the_layers_that_its_weights_name(path, x):
    """Without such names, each node that has weights is a layer, by its own name."""
    proto = proto_of(path)
    for number, node in enumerate(proto.graph.node):
        del node.metadata_props[:]
        node.name = f"{node.op_type}_{number}"
    del proto.graph.value_info[:]
    report = Inspector(proto).run_inspection(x)
    assert {"stem", "blocks.0.conv", "fc", "relu"} <= set(report.layers)
    plain = {one.name: f"w{number}" for number, one in enumerate(proto.graph.initializer)}
    for one in proto.graph.initializer:
        one.name = plain[one.name]
    for node in proto.graph.node:
        node.input[:] = [plain.get(name, name) for name in node.input]
    report = Inspector(proto).run_inspection(x)
    assert {"Conv_0", "relu"} <= set(report.layers)
    assert report["Conv_0"].type_name == "Conv2d"


def without_names(proto: Any) -> Any:
    """Return a model without what says which layer a node is of, as optimisers of graphs do."""
    for node in proto.graph.node:
        del node.metadata_props[:]
        node.name = ""
    del proto.graph.value_info[:]
    return proto


class Rectified(nn.Module):
    """Activations between layers, behind a residual sum and before an output."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.relu1 = nn.Linear(6, 8), nn.ReLU()
        self.fc2, self.relu2 = nn.Linear(8, 8), nn.ReLU()
        self.fc3, self.fc4, self.fc5 = nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.relu1(self.fc1(x))
        second = F.relu6(self.fc3(self.relu2(self.fc2(first) + first)))
        return self.fc4(second), F.tanh(self.fc5(second))


@pytest.mark.parametrize("is_new", [True, False])
def test_a_graph_without_metadata_is_equivalent_where_nothing_is_wrong(tmp_path, is_new):
    """An activation is no part of the layer that reads it; with other weights a layer is named."""
    torch.manual_seed(0)
    model, x, file = Rectified().eval(), torch.randn(16, 6), tmp_path / "model.onnx"
    torch.onnx.export(model, (x,), file, dynamo=is_new)
    proto = without_names(proto_of(file))
    comparison = compare(model, proto, x)
    assert comparison.equivalent, str(comparison)
    assert {name for name, _ in comparison.layers if name} >= {"fc1", "fc2", "fc3", "fc4", "fc5"}
    bias = next(one for one in proto.graph.initializer if one.name == "fc3.bias")
    values = onnx.numpy_helper.to_array(bias) + np.float32(0.1)
    bias.CopyFrom(onnx.numpy_helper.from_array(values, bias.name))
    assert compare(model, proto, x).first_divergence.layer == "fc3"


def test_weights_in_eight_bits_are_compared_by_their_own_steps(model, x, path, tmp_path):
    """What onnxruntime's quantiser wrote is equivalent; a layer with another's scale is named."""
    from onnxruntime.quantization import quantize_dynamic

    file = tmp_path / "int8.onnx"
    quantize_dynamic(path, file)
    proto = proto_of(file)
    report = Inspector(proto).run_inspection(x)
    assert {"mix", "act", "norm", "silu"} <= set(report.layers)
    assert report["mix"].parameters["weight"].shape == (12, 12)
    comparison = compare(model, proto, x)
    assert comparison.equivalent, str(comparison)
    scale = next(one for one in proto.graph.initializer if one.name.endswith("_scale"))
    values = onnx.numpy_helper.to_array(scale) * np.float32(1.5)
    scale.CopyFrom(onnx.numpy_helper.from_array(values, scale.name))
    assert not compare(model, proto, x).equivalent


class Summed(nn.Module):
    """A block that ends in an activation, which static quantisation does by its rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.relu = nn.Linear(6, 6), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.fc(x) + x)


def test_rounding_in_the_place_of_an_activation_is_of_the_block_that_had_it(tmp_path):
    """The right file is equivalent; where rounding cuts off too much, the block is named."""
    from onnxruntime.quantization import CalibrationDataReader, quantize_static

    class Once(CalibrationDataReader):
        def __init__(self, batch: Tensor) -> None:
            self.left = [{"input": batch.numpy()}]

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    torch.manual_seed(0)
    model, x, file = nn.Sequential(Summed(), Summed()).eval(), torch.randn(64, 6), tmp_path / "x"
    torch.onnx.export(model, (x,), file, dynamo=True, verbose=False)
    quantize_static(file, file.with_suffix(".int8"), Once(x))
    proto = proto_of(file.with_suffix(".int8"))
    assert not [node for node in proto.graph.node if node.op_type == "Relu"]
    comparison = compare(model, proto, x)
    assert comparison.equivalent, str(comparison)
    scale = next(one for one in proto.graph.initializer if one.name == "relu_scale")
    values = onnx.numpy_helper.to_array(scale) * np.float32(0.2)
    scale.CopyFrom(onnx.numpy_helper.from_array(values, scale.name))
    assert compare(model, proto, x).first_divergence.layer.split(".")[0] == "0"


def bad(what: str, path: Path, tmp_path: Path) -> Any:
    """Return an ONNX model that cannot be loaded."""
    if what == "missing":
        return tmp_path / "none.onnx"
    file = tmp_path / "bad.onnx"
    if what == "nonsense":
        file.write_bytes(b"nonsense")
        return file
    if what == "cut":
        file.write_bytes(path.read_bytes()[:-300])
        return file
    if what == "alone":
        file.write_bytes(path.read_bytes())
        return file
    proto = onnx.load(path, load_external_data=what != "not loaded")
    if what == "opset":
        proto.opset_import[0].version = 99
    if what == "operator":
        node_of(proto, "Gelu").op_type = "Own"
    return proto


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("missing", "there is no ONNX file"),
        ("nonsense", "cannot load .*bad.onnx.*it is no ONNX model"),
        ("cut", "it is no ONNX model, or not all of one"),
        ("alone", "model.onnx.data.*it keeps weights in another file: put that beside the model"),
        ("not loaded", "model.onnx.data.*give the model's path"),
        ("operator", "Own.*register_custom_ops_library"),
        ("opset", "Opset 99 .*export it with an opset_version"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused(path, tmp_path, what, words):
    """With what onnxruntime says, and no traceback through it."""
    with pytest.raises(InspectionError, match=words) as caught:
        Inspector(bad(what, path, tmp_path))
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert "ONNXRuntimeError" not in str(caught.value)


def test_what_an_onnx_model_cannot_do_is_said(model, x, path):
    """Batches that do not fit, gradients, training, being the reference, unknown layers."""
    inspector = Inspector(path)
    for batch, words in (
        (x[:, :, :5], "invalid dimensions for input: x .*Got: 5 Expected: 8"),
        (x.double(), "Unexpected input data type.*expected: .tensor.float."),
        ({"y": x}, "takes 'x', and the batch has 'y'"),
    ):
        with pytest.raises(InspectionError, match=words):
            inspector.run_inspection(batch)
    with pytest.raises(InspectionError, match="no backward pass through"):
        inspector.run_inspection(x, backward=True)
    with pytest.raises(InspectionError, match="as a loop does"):
        inspector.run_step(lambda *_: None, object(), x)
    with pytest.raises(InspectionError, match="the loop runs it"):
        inspector.monitor()
    with pytest.raises(InspectionError, match="the reference is"):
        compare(path, model, x)
    with pytest.raises(LayerNotFoundError, match="no layer of Net"):
        inspector.watch("block.*")
    assert not inspector.run_inspection(x, probes=True).violations
    assert copy.deepcopy(inspector._model)(x)[0].shape == (40, 12)
