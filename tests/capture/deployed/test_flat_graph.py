"""Graphs of PT2E quantisation, held to the graph run as it is."""

from __future__ import annotations

import pytest
from torch import nn

from corpus.models.quantised import batch, fresh, pt2e
from pytest_modelhealth import InspectionError, Inspector
from pytest_modelhealth.report import Status

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def graph() -> nn.Module:
    """Return a small CNN, quantised."""
    pytest.importorskip("torchao.quantization.pt2e.quantize_pt2e")
    return pt2e(fresh(), batch())


def test_layers_have_their_names_and_the_values_of_the_graph(graph):
    """Each layer is seen under the name it had; the last one gives what the graph returns."""
    report = Inspector(graph).run_inspection(batch())
    names = ["conv1", "relu1", "conv2", "block", "block.fc", "block.relu", "head"]
    assert all(report[name].status is Status.OBSERVED for name in names)
    expected = graph(batch())
    assert report["head"].activations.mean == pytest.approx(float(expected.mean()), rel=1e-5)
    assert report["conv2"].inputs.dtype == "quint8"
    assert report["conv1"].parameters["weight"].dtype == "qint8"
    assert report["block"].type_name == "Block"
    report.assert_healthy()
    with pytest.raises(InspectionError, match="no backward pass"):
        Inspector(graph).run_inspection(batch(), backward=True)
    weight = report["block.fc"].parameters["weight"]  # whole numbers with scales of channels
    reference = fresh().block.fc.weight
    assert weight.shape == tuple(reference.shape)
    assert weight.abs_max == pytest.approx(float(reference.abs().max()), rel=0.01)
