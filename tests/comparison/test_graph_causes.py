"""Causes in deployed copies are read from their graphs: the setting or weight that differs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from corpus.models.exported import (
    GRAPHS,
    SERIES,
    Averaged,
    Mapped,
    Own,
    X,
    between,
    edited,
    reweighted,
)
from pytest_modelhealth import Comparison, compare

pytestmark = pytest.mark.filterwarnings("ignore")


def exported(model: nn.Module, x: Tensor, path: Any, is_new: bool) -> Any:
    """The ONNX model of a module, by the exporter of either kind."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    options = {"external_data": False, "verbose": False} if is_new else {}
    torch.onnx.export(model, (x,), path, dynamo=is_new, opset_version=20, **options)
    return onnx.load(path)


def cause_of(comparison: Comparison) -> str:
    """The cause of what is not equivalent."""
    assert not comparison.equivalent
    assert comparison.first_divergence is not None
    return comparison.first_divergence.cause


@pytest.mark.parametrize("case", GRAPHS)
def test_what_differs_in_an_onnx_graph_is_named(tmp_path, case):
    """The layer whose operator or weight was edited; the export as it is has no difference."""
    model, x, edits = GRAPHS[case]
    proto = exported(model, x, tmp_path / "model.onnx", True)
    right = compare(model, proto, x)
    assert right.equivalent, right
    assert not any(", was " in note or " was " in note for note in right.notes), right.notes
    for place, change, layer in edits:
        is_setting = isinstance(place, str)
        made = edited(proto, place, **change) if is_setting else reweighted(proto, place, change)
        wrong = compare(model, made, x)
        assert not wrong.equivalent
        assert wrong.first_divergence.layer == layer, wrong


@pytest.mark.parametrize(("x", "per_channel"), [(X, True), (SERIES, False)], ids=["Gemm", "MatMul"])
def test_a_scale_of_eight_bits_is_one_of_the_layer_that_it_scales(tmp_path, x, per_channel):
    """A doubled scale is other weights there; its copy without a fault is equivalent."""
    onnx = pytest.importorskip("onnx")
    quantization = pytest.importorskip("onnxruntime.quantization")
    model = between(nn.ReLU(), nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16))
    file, made, batches = tmp_path / "m.onnx", tmp_path / "int8.onnx", iter([{"x": x.numpy()}])
    torch.onnx.export(model, (x,), file, dynamo=True, input_names=["x"], external_data=False)
    data = SimpleNamespace(get_next=lambda: next(batches, None))
    # in seven bits: without VNNI a processor saturates sums of two products of eight
    quantization.quantize_static(file, made, data, per_channel=per_channel, reduce_range=True)
    right = compare(model, made, x)
    assert right.equivalent, right
    proto = onnx.load(made)
    sizes = {one.name: tuple(one.dims) for one in proto.graph.initializer}
    weight = next(n for n in sizes if sizes[n] in ((16, 24), (24, 16)) and n.endswith("_quantized"))
    scale = f"{weight.removesuffix('_quantized')}_scale"
    for one in proto.graph.initializer:
        if one.name == scale:
            one.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(one) * 2, scale))
    wrong = compare(model, proto, x)
    assert wrong.first_divergence.layer in ("2", "4"), wrong


def test_what_was_not_read_is_not_said(tmp_path):
    """No untouched settings, no changed code, no blank type: nothing of an own module is known."""
    model, wrong = nn.Sequential(Own(), nn.Linear(32, 4)), nn.Sequential(Own(2.0), nn.Linear(32, 4))
    wrong.load_state_dict(model.state_dict())
    proto = exported(wrong, X, tmp_path / "model.onnx", True)
    for candidate in (proto, torch.jit.trace(wrong, (X,))):
        comparison = compare(model, candidate, X)
        assert comparison.first_divergence.layer == "0"
        for word in ("settings are the same", "same weights", "it is a ,", "dim is"):
            assert word not in str(comparison), comparison


def test_nobody_removed_a_function_that_cannot_be_seen():
    """A map over the wrong axis and a length baked in lie in the code of the model around it."""
    plain, mapped, other = Mapped(), Mapped(0), Mapped(1)
    for one in (mapped, other):
        one.load_state_dict(plain.state_dict())
    right = compare(plain, mapped, SERIES)
    assert right.equivalent, right
    assert "called" not in str(right), right
    wrong = compare(plain, other, SERIES)
    assert wrong.first_divergence.label == "Mapped", wrong
    for word in ("removed", "called"):
        assert word not in str(wrong), wrong
    assert cause_of(wrong) == "axis is 1, was None"

    model = Averaged()
    trace = torch.jit.trace(model, (SERIES,))
    assert compare(model, trace, SERIES).equivalent
    wrong = compare(model, trace, SERIES[:, :6])
    assert wrong.first_divergence.label == "Averaged", wrong
    assert "removed" not in str(wrong), wrong
    assert "its own code after relu changed" in wrong.first_divergence.story
