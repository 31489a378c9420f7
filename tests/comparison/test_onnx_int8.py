"""Transformers that onnxruntime quantised: it sorts nodes anew, and leaves some without a name."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from corpus.models.exported import gpt2, llama
from pytest_modelhealth import compare

pytest.importorskip("onnxruntime.quantization")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


class Batches:
    """Gives one batch for calibration."""

    def __init__(self, batch: dict[str, torch.Tensor]) -> None:
        self._batches: Iterator[Any] = iter([{name: t.numpy() for name, t in batch.items()}])

    def get_next(self) -> Any:
        """Return the next batch, ``None`` after the last."""
        return next(self._batches, None)


@pytest.fixture(scope="module", params=[llama, gpt2], ids=lambda make: make.__name__)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[nn.Module, dict[str, torch.Tensor], Path]:
    """A model, a batch, and the file of its program."""
    torch.manual_seed(0)
    model, batch = request.param()
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model, (), path, kwargs=batch, dynamo=True, verbose=False, external_data=False
        )
    return model, batch, path


def quantised(kind: str, path: Path, batch: dict[str, torch.Tensor]) -> Path:
    """The file of the quantised program."""
    from onnxruntime import quantization

    made = path.with_name(f"{kind}.onnx")
    logging.disable(logging.WARNING)
    try:
        if kind == "dynamic":
            quantization.quantize_dynamic(path, made)
        else:
            quantization.quantize_static(path, made, Batches(batch))
    finally:
        logging.disable(logging.NOTSET)
    return made


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_quantised_transformer_is_equivalent_layer_by_layer(
    exported: tuple[nn.Module, dict[str, torch.Tensor], Path], kind: str
) -> None:
    """And a layer whose scale was changed is named."""
    import onnx
    from onnx import numpy_helper

    model, batch, path = exported
    file = quantised(kind, path, batch)
    right = compare(model, str(file), batch)
    assert right.equivalent, right
    assert len(right.layers) > 20
    assert not any("keys is" in note or "q_proj: its inputs" in note for note in right.notes)

    program = onnx.load(file)
    scale = _scale_of_the_widest_product(program)
    wrong = copy.deepcopy(program)
    for one in wrong.graph.initializer:
        if one.name == scale:
            one.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(one) * 1.5, one.name))
    found = compare(model, wrong, batch)
    assert not found.equivalent
    # a product whose weight lost its name is no layer any more, and what reads it shows the fault
    assert found.first_divergence.layer.rpartition(".")[2] in ("silu", "gate_proj", "c_fc"), found


def _scale_of_the_widest_product(program: Any) -> str:
    """The scale of the weight of the first layer that widens what it takes."""
    sizes = {one.name: tuple(one.dims) for one in program.graph.initializer}
    for node in program.graph.node:
        for name in node.input:
            size = sizes.get(name, ())
            if name.endswith("_quantized") and len(size) == 2 and size in ((32, 64), (32, 128)):
                return name.removesuffix("_quantized") + "_scale"
    raise AssertionError("no such weight")
