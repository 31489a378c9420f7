"""Sends the numbers of each watched step to TensorBoard or to a function."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pytest_modelhealth.errors import InspectionError, ModelHealthWarning
from pytest_modelhealth.report import HealthReport
from pytest_modelhealth.statistics import TensorStatistics
from pytest_modelhealth.training.libraries import is_of
from pytest_modelhealth.training.monitoring.row import StepRow, require_statistic


class Function:
    """Calls ``function(step, numbers)``."""

    takes_histograms = False
    failures = 0
    """How many steps in a row it did not take."""
    is_warned = False

    def __init__(self, destination: Callable[[int, dict[str, float]], object]) -> None:
        self._destination = destination

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step by their names."""
        self._destination(step, dict(numbers))

    def write_histograms(self, step: int, histograms: Mapping[str, TensorStatistics]) -> None:
        """Write what was seen of tensors; nothing, as a function gets numbers alone."""

    def __str__(self) -> str:
        return str(getattr(self._destination, "__name__", type(self._destination).__name__))


class TensorBoard(Function):
    """Adds scalars, and histograms, to a `SummaryWriter` of torch or of tensorboardX."""

    takes_histograms = True
    _destination: Any

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Add a scalar for each number."""
        for name, value in numbers.items():
            self._destination.add_scalar(name, value, step)

    def write_histograms(self, step: int, histograms: Mapping[str, TensorStatistics]) -> None:
        """Add the counts that were kept of each tensor, in bins by powers of two."""
        for name, seen in histograms.items():
            counts, edges = seen.histogram
            self._destination.add_histogram_raw(
                name,
                min=seen.min,
                max=seen.max,
                num=seen.finite_count,
                sum=seen.mean * seen.finite_count,
                sum_squares=seen.norm**2,
                bucket_limits=edges[1:].tolist(),
                bucket_counts=counts.tolist(),
                global_step=step,
            )


def writers_of(to: Any) -> list[Function]:
    """Return what writes to a destination, or to several in a list or tuple.

    Raises:
        InspectionError: something is no destination.
    """
    if to is None:
        return []
    return [_writer(one) for one in (to if isinstance(to, list | tuple) else [to])]


def _writer(destination: Any) -> Function:
    is_tensorboard = is_of(destination, "torch.utils.tensorboard", "tensorboardX")
    if is_tensorboard and hasattr(destination, "add_scalar"):
        return TensorBoard(destination)
    if callable(destination) and not isinstance(destination, type):
        return Function(destination)
    raise InspectionError(
        f"to={destination!r} ({type(destination).__name__}) is nothing that numbers can be "
        "written to. Give a SummaryWriter of TensorBoard, a function of the step and a dictionary "
        "of numbers by name (for any other logger: to=lambda step, numbers: run.log(numbers)), or "
        "a list of them."
    )


WRITTEN = (
    "activation_rms",
    "dead_fraction",
    "gradient_norm",
    "parameter_gradient_norm",
    "update_ratio",
)
"""The statistics of a layer that are written unless others are asked for."""

_ROLES = ("activations", "gradients", "parameters", "parameter_gradients")
_MOST_FAILURES = 3


class Scalars:
    """An observer of a monitor that writes to destinations.

    ``modelhealth/loss``, ``modelhealth/gradient_norm`` and ``modelhealth/update_ratio`` are of the
    whole model, ``modelhealth/encoder.0/gradient_norm`` is of a layer. Written are layers that hold
    no others, and those with parameters of their own; the model itself goes by its type's name.

    Args:
        writers: of the destinations.
        model_type: name of the model's type.
        report: makes the report of the latest watched step, for histograms.
        statistics: of each layer.
        histograms: whether destinations that take them get histograms.

    Raises:
        InspectionError: there is no such statistic.
    """

    def __init__(
        self,
        writers: Sequence[Function],
        model_type: str,
        report: Callable[[], HealthReport],
        statistics: Iterable[str] | None = None,
        histograms: bool = False,
    ) -> None:
        self._writers = list(writers)
        self._model_type = model_type
        self._report = report
        self._statistics = WRITTEN if statistics is None else _names(statistics)
        self._histograms = histograms

    def __call__(self, row: StepRow) -> None:
        """Write the numbers of a step."""
        numbers = dict(self._numbers(row))
        for writer in self._writers:
            if writer.failures < _MOST_FAILURES:
                self._write(writer, row, numbers)

    def _write(self, writer: Function, row: StepRow, numbers: dict[str, float]) -> None:
        try:
            writer.write(row.step, numbers)
            if self._histograms and writer.takes_histograms:
                writer.write_histograms(row.step, dict(self._seen(row)))
            writer.failures = 0
        except Exception as error:  # noqa: BLE001 - another library's: the training goes on
            writer.failures += 1
            if not writer.is_warned:
                writer.is_warned = True
                warnings.warn(
                    f"{writer} did not take the numbers of step {row.step}: "
                    f"{type(error).__name__}: {error}. The training goes on, and the monitor keeps "
                    f"its history; after {_MOST_FAILURES} failures in a row nothing more is "
                    "written there",
                    ModelHealthWarning,
                    stacklevel=5,
                )

    def _numbers(self, row: StepRow) -> Iterator[tuple[str, float]]:
        if row.loss is not None:
            yield "modelhealth/loss", row.loss
        if any(not math.isnan(v) for v in row.values["parameter_gradient_norm"].tolist()):
            yield "modelhealth/gradient_norm", row.gradient_norm
        if not math.isnan(row.update_ratio):
            yield "modelhealth/update_ratio", row.update_ratio
        written = _written(row)
        for statistic in self._statistics:
            values = row.values[statistic].tolist()
            for layer, value in zip(row.layers, values, strict=True):
                if layer in written and not math.isnan(value):
                    yield f"modelhealth/{layer or self._model_type}/{statistic}", value

    def _seen(self, row: StepRow) -> Iterator[tuple[str, TensorStatistics]]:
        report, written = self._report(), _written(row)
        for layer in row.layers:
            for role in _ROLES if layer in written else ():
                seen = report[layer].statistics(role)
                if seen is not None and seen.finite_count:
                    yield f"modelhealth/{layer or self._model_type}/{role}", seen


def _written(row: StepRow) -> set[str]:
    """Return the layers that hold no others, or parameters of their own."""
    holders = {layer.rpartition(".")[0] for layer in row.layers if layer}
    norms = row.values["parameter_norm"].tolist()
    return {
        layer
        for layer, norm in zip(row.layers, norms, strict=True)
        if layer not in holders or not math.isnan(norm)
    }


def _names(statistics: Iterable[str]) -> tuple[str, ...]:
    listed = (statistics,) if isinstance(statistics, str) else tuple(statistics)
    for statistic in listed:
        require_statistic(statistic)
    return listed
