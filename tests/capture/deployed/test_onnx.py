"""ONNX models: each layer is seen as onnxruntime computes it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from corpus.models import exported
from corpus.models.exported import Convolved, Summed
from pytest_modelhealth import InspectionError, Inspector, LayerNotFoundError, compare
from pytest_modelhealth.report import Status

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """A model whose batch norms have seen data."""
    torch.manual_seed(0)
    made = Convolved()
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


def node_of(proto: Any, operator: str, number: int = 0) -> Any:
    """Return one node of a model by its operator."""
    return [node for node in proto.graph.node if node.op_type == operator][number]


def test_each_layer_has_the_statistics_of_the_eager_model(model, x, path, old):
    """What hooks see of the eager model, in float64, is what is seen of both files.

    A batch norm is folded into the convolution before it, whose own output exists no longer. A file
    of the exporter that writes no metadata has its nodes by their own names.
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
    report = Inspector(path).run_inspection(x)
    seen = {name for name, layer in report.layers.items() if not layer.functional}
    assert seen == {*expected, ""} - {f"blocks.{n}.conv" for n in range(2)}
    for name in seen & set(expected):
        values, statistics = expected[name], report[name].activations
        assert statistics.count == values.size, name
        assert statistics.mean == pytest.approx(values.mean(), rel=1e-4, abs=1e-6)
        assert statistics.std == pytest.approx(values.std(), rel=1e-4)
        assert statistics.max == pytest.approx(values.max(), rel=1e-4)
    assert report["mix"].calls == 2
    assert report["blocks.0.relu"].functional
    assert all(layer.status is Status.OBSERVED for layer in report.layers.values())
    assert report.healthy, str(report)
    assert report["mix"].source.startswith(exported.__file__)
    assert report["fc"].type_name == "Linear"
    assert set(report["fc"].parameters) == {"weight", "bias"}
    assert set(report[""].parameters) == {"scale"}
    report = Inspector(old).run_inspection(x)
    assert report["/fc/Gemm"].activations.mean == pytest.approx(expected["fc"].mean(), rel=1e-4)
    assert report.healthy, str(report)


def test_what_the_session_holds_is_looked_at_and_not_changed(model, x, path):
    """A session of a file has its graph; one without a graph shows its outputs, and says so."""
    before = {file.name: file.read_bytes() for file in path.parent.iterdir()}
    session = onnxruntime.InferenceSession(path)
    report = Inspector(session).watch("blocks.*").run_batches([x[:24], x[24:], x[:3]])
    assert "blocks.1.bn" in report.layers
    proto = onnx.load(path)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    assert len(Inspector(session).run_inspection(x).layers) > 10
    session._model_bytes = None
    report = Inspector(session).run_inspection(x)
    assert list(report.layers) == [""]
    assert "inputs and outputs alone are seen" in str(report)
    assert compare(model, session, x).equivalent
    assert before == {file.name: file.read_bytes() for file in path.parent.iterdir()}


def test_a_loaded_model_runs_where_it_came_from(model, path, x):
    """A replay and a copy inspect the stand-ins, and see the functional layers as well.

    ONNX returns tensors in a row, which a loss of the nested output was not written for.
    """
    first = Inspector(path)
    again = Inspector(copy.deepcopy(first._model))
    layers = [list(one.run_inspection(x).layers) for one in (first, again)]
    assert layers[0] == layers[1]
    comparison = compare(model, path, x, loss=lambda output: output["logits"].sum())
    assert comparison.equivalent, str(comparison)
    assert comparison.losses[1] is None
    # a convolution is folded: what it gave is compared behind the batch norm, with no remark
    assert [note for note in comparison.notes if "onnxruntime" not in note] == []


def test_a_deployed_model_gets_a_verdict(path, x):
    """Dead units behind a folded batch norm, and a NaN, where they begin."""
    proto = onnx.load(path)
    for name, value in (("blocks.0.conv.bias", -1e3), ("norm.bias", float("nan"))):
        held = next(one for one in proto.graph.initializer if one.name == name)
        values = np.full_like(onnx.numpy_helper.to_array(held), value)
        held.CopyFrom(onnx.numpy_helper.from_array(values, name))
    report = Inspector(proto).run_inspection(x)
    found = {(violation.layer, violation.check) for violation in report.violations}
    assert ("blocks.0.relu", "dead_units") in found
    assert ("norm", "finite") in found


@pytest.mark.parametrize("is_new", [True, False])
def test_a_graph_without_metadata_is_compared_by_its_outputs(model, x, path, old, is_new):
    """Each node is shown by its own name, and which layer it is of nobody says."""
    proto = onnx.load(path if is_new else old)
    for node in proto.graph.node:
        del node.metadata_props[:]
    report = Inspector(proto).run_inspection(x)
    assert "shown by its own name" in str(report)
    assert any(layer.type_name == "Gelu" for layer in report)
    right = compare(model, proto, x)
    assert right.equivalent, str(right)
    assert [pair for pair, layer in right.layers.items() if layer.tensors] in ([], [("", "")])
    bias = next(one for one in proto.graph.initializer if one.name == "fc.bias")
    values = onnx.numpy_helper.to_array(bias) + np.float32(0.1)
    bias.CopyFrom(onnx.numpy_helper.from_array(values, bias.name))
    wrong = compare(model, proto, x)
    assert wrong.first_divergence.layer == ""
    assert "no layer inside the candidate can be told" in wrong.first_divergence.story


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
    # in seven bits: without VNNI a processor saturates sums of two products of eight
    quantize_static(file, file.with_suffix(".int8"), Once(x), reduce_range=True)
    proto = onnx.load(file.with_suffix(".int8"))
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
        ("nonsense", "cannot load .*bad.onnx.*the path of a whole model"),
        ("cut", "cannot load .*the path of a whole model"),
        ("alone", "model.onnx.data.*the files of its weights beside it"),
        ("not loaded", "model.onnx.data.*give the path"),
        ("operator", "Own.*or a session that has them"),
        ("opset", "Opset 99 .*an opset and operators that this onnxruntime has"),
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
    with pytest.raises(LayerNotFoundError, match="no layer of Convolved"):
        inspector.watch("block.*")
    assert not inspector.run_inspection(x, probes=True).violations
    assert copy.deepcopy(inspector._model)(x)[0].shape == (40, 12)
