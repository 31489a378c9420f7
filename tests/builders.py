"""Observations built by hand, so that what reads a report is tested without running a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pytest_modelhealth.checks import default_settings
from pytest_modelhealth.checks.judging import judge
from pytest_modelhealth.rendering import renderer
from pytest_modelhealth.report import HealthReport, LayerRecord, Observation, Status
from pytest_modelhealth.snapshot.drift import DriftReport, detect_drift
from pytest_modelhealth.snapshot.file_format import dump, load
from pytest_modelhealth.snapshot.snapshot import of_report
from pytest_modelhealth.statistics import TensorStatistics, reduce


def layer(
    name: str,
    *,
    type_name: str = "Linear",
    inputs: Tensor | None = None,
    activations: Tensor | None = None,
    gradients: Tensor | None = None,
    parameters: Mapping[str, Tensor] | None = None,
    parameter_gradients: Mapping[str, Tensor] | None = None,
    buffers: Mapping[str, Tensor] | None = None,
    status: Status = Status.OBSERVED,
    **fields: Any,
) -> LayerRecord:
    """Return a layer's record whose statistics are those of the tensors given."""
    return LayerRecord(
        name=name,
        type_name=type_name,
        status=status,
        calls=0 if status is Status.NOT_CALLED else 1,
        inputs=_statistics(inputs),
        activations=_statistics(activations),
        gradients=_statistics(gradients),
        parameters=_mapping(parameters),
        parameter_gradients=_mapping(parameter_gradients),
        buffers=_mapping(buffers),
        **fields,
    )


def observation(*records: LayerRecord, **fields: Any) -> Observation:
    """Return an observation of these layers, entered in the order given and completed likewise.

    A record that already says when it was entered keeps its word.
    """
    numbered = {}
    for position, record in enumerate(records):
        values = dict(vars(record))
        if record.status is not Status.NOT_CALLED and record.entered is None:
            values |= {"entered": position, "completed": 2 * position + 1}
        numbered[record.name] = LayerRecord(**values)
    fields = {"model_type": "Model", "loss": 1.0, "backward": True, "samples": 64} | fields
    return Observation(layers=numbered, **fields)


def report(*records: LayerRecord, **fields: Any) -> HealthReport:
    """Return a report on these layers under the default settings."""
    return HealthReport(
        observation(*records, **fields), default_settings(), judge, renderer=renderer
    )


def _statistics(tensor: Tensor | None) -> TensorStatistics | None:
    if tensor is None:
        return None
    return reduce(tensor, unit_dim=-1 if tensor.ndim > 1 else None)


def _mapping(tensors: Mapping[str, Tensor] | None) -> dict[str, TensorStatistics]:
    return {name: reduce(tensor) for name, tensor in (tensors or {}).items()}


def record(report: HealthReport) -> str:
    """Return the text of a snapshot of a report."""
    return dump(of_report(report))


def check(text: str, report: HealthReport) -> DriftReport:
    """Return what separates a report from a recorded snapshot."""
    return detect_drift(load(text), of_report(report))
