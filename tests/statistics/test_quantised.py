"""The steps of quantised tensors, held to the values that these can have."""

from __future__ import annotations

import pytest
import torch

from pytest_modelhealth.statistics.dense import dense_values, is_quantised, step

pytestmark = pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")


def neighbours(values: torch.Tensor) -> float:
    """Return the least distance between two different values."""
    return float(values.unique().double().diff().min())


def test_the_step_is_the_distance_of_neighbouring_values():
    """Of many values each level is taken, so that neighbours are a step apart."""
    torch.manual_seed(0)
    tensor = torch.quantize_per_tensor(torch.randn(4000), 0.03, 7, torch.quint8)
    assert step(tensor).item() == pytest.approx(neighbours(tensor.dequantize()), rel=1e-4)
    scales = torch.tensor([0.01, 0.2, 0.05])
    points = torch.zeros(3, dtype=torch.long)
    rows = torch.quantize_per_channel(torch.randn(3, 9000), scales, points, 0, torch.qint8)
    found = step(rows).expand(3, 1).flatten()
    truth = [neighbours(row) for row in rows.dequantize()]
    assert found.tolist() == pytest.approx(truth, rel=1e-4)


def test_plain_tensors_have_no_step():
    """Neither numbers nor parameters of a model in floating point are quantised."""
    for tensor in (torch.randn(3), torch.nn.Parameter(torch.randn(3)), torch.arange(3)):
        assert step(tensor) is None
        assert not is_quantised(tensor)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_weights_of_torchao_are_read_with_their_steps(kind):
    """What is read is within half a step of the weight, and a half is needed."""
    quantization = pytest.importorskip("torchao.quantization")
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 32)
    before = layer.weight.detach().clone()
    quantization.quantize_(layer, getattr(quantization, kind)())
    assert is_quantised(layer.weight)
    error = (dense_values(layer.weight).values - before).abs().double()
    by_step = error / step(layer.weight)
    assert 0.4 < float(by_step.max()) < 0.51
