"""Models in other wrappings and number formats: the same report, or a reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from corpus.models.hooked import Nested, Small, x
from pytest_modelhealth import InspectionError, Inspector
from pytest_modelhealth.report import HealthReport, Status
from tests.capture.oracle import changes, fingerprint, projection, report_of

pytestmark = pytest.mark.filterwarnings("ignore")


def as_data(report: HealthReport) -> Any:
    """Return every number and word of a report's layers, and its loss."""
    return report.to_dict()["layers"], report.loss


# ---- wrappers ----------------------------------------------------------------------------------


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    if not dist.is_available():
        pytest.skip("torch is built without distributed")
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_a_pipeline_is_inspected_by_its_stages() -> None:
    """The module of a stage is any module; its schedule and the stage itself are refused."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    model, batch = Nested(), x()
    expected = as_data(report_of(model, batch))
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2)
    assert as_data(report_of(schedule._stage.submod, batch)) == expected
    for refused in (schedule, stage):
        with pytest.raises(
            InspectionError, match=r"schedule\._stage\.submod, .* before it was split"
        ):
            Inspector(refused)


def test_checkpointed_models_report_like_the_model_inside() -> None:
    """`checkpoint_wrapper` leaves no trace in names, calls or numbers."""
    model, batch = Nested(), x()
    expected = as_data(report_of(model, batch))
    model.block = checkpoint_wrapper(model.block)
    model.block._checkpoint_wrapped_module[0] = checkpoint_wrapper(model.block[0])
    assert as_data(report_of(model, batch)) == expected


# ---- number formats ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_shows_the_dtypes_it_computes_in(dtype: torch.dtype) -> None:
    """Activations are in the low precision, parameters and their gradients in float32."""
    model, batch = Small(), x()
    name = str(dtype).removeprefix("torch.")
    with torch.autocast("cpu", dtype):
        report = report_of(model, batch, loss=lambda output: projection(output) / 64)
        with torch.no_grad():
            output = model.train()[0](batch)
    layer = report["0"]
    assert layer.status is Status.OBSERVED
    assert layer.activations.dtype == layer.gradients.dtype == name
    assert layer.parameter_gradients["weight"].dtype == "float32"
    assert layer.activations.mean == pytest.approx(output.double().mean().item(), abs=1e-12)
    assert layer.activations.std == pytest.approx(output.double().std(correction=0).item())


def test_statically_quantised_layers_are_observed() -> None:
    """Activations in integers count as the real numbers they stand for."""
    quantization = torch.ao.quantization
    if not hasattr(quantization, "convert"):
        pytest.skip("this torch has no static quantisation")
    torch.backends.quantized.engine = torch.backends.quantized.supported_engines[-1]
    model = nn.Sequential(
        quantization.QuantStub(), nn.Linear(6, 5), nn.ReLU(), quantization.DeQuantStub()
    ).eval()
    model.qconfig = quantization.default_qconfig
    quantization.prepare(model, inplace=True)
    model(x())
    quantization.convert(model, inplace=True)
    batch = x()
    before = fingerprint(model, batch)
    report = report_of(model, batch)
    expected = model[1](model[0](batch)).dequantize()
    assert report["1"].activations.dtype == "quint8"
    assert report["1"].activations.mean == pytest.approx(expected.mean().item(), abs=1e-6)
    assert report["3"].activations.dtype == "float32"
    # packed weights are pickled with their address
    assert set(changes(before, fingerprint(model, batch))) <= {"pickle"}
