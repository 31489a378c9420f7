"""Writes the numbers of each watched step to a file, to TensorBoard or to a function.

A line is written at once, so that a crash loses one at most.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from mmap import mmap
from pathlib import Path
from typing import IO, Any

from pytest_modelhealth.errors import InspectionError, ModelHealthWarning
from pytest_modelhealth.report import HealthReport
from pytest_modelhealth.statistics import TensorStatistics
from pytest_modelhealth.training.libraries import is_of
from pytest_modelhealth.training.monitoring.row import STATISTICS, StepRow, require_statistic

COLUMNS = ("step", "loss", "gradient_norm", "update_ratio")
"""The first columns; one for each layer and statistic follows, ``encoder.0:gradient_norm``."""


class Lines(ABC):
    """A file to which a line is added for each watched step.

    A file that is there is continued; an unfinished last line, which a crash left, is removed.

    Args:
        path: where it lies.
        layers: names of the layers that are known from the start.
    """

    def __init__(self, path: str | os.PathLike[str], layers: Sequence[str]) -> None:
        self.path = Path(path)
        self._layers = layers
        self._file: IO[bytes] | None = None

    def open(self) -> None:
        """Open the file.

        Raises:
            InspectionError: it cannot be written, or what is in it does not fit.
        """
        try:
            self._file = self.path.open("r+b" if self.path.exists() else "x+b")
            end = 0
            # an empty file cannot be mapped
            with suppress(ValueError), mmap(self._file.fileno(), 0) as lines:
                end = lines.rfind(b"\n") + 1
            self._file.truncate(end)  # without a line that a crash left unfinished
            self._file.seek(0)
            self._check(self._file.readline().decode(errors="replace"))
            self._file.seek(0, os.SEEK_END)
        except OSError as error:
            self.close()
            raise InspectionError(f"cannot write {str(self.path)!r}: {error}") from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def write(self, row: StepRow) -> None:
        """Add a line. A file that cannot be written any longer is left alone, with a warning."""
        if self._file is None:
            return
        try:
            self._file.write(self._text(row).encode())
            self._file.flush()
        except OSError as error:
            with suppress(OSError):  # closing writes what is left
                self.close()
            warnings.warn(
                f"cannot write {str(self.path)!r} any longer, after step {row.step}: {error}; the "
                "training goes on, and the monitor keeps its history",
                ModelHealthWarning,
                stacklevel=4,
            )

    @abstractmethod
    def _check(self, first: str) -> None:
        """Do nothing if the first line, ``""`` of a new file, fits what will be written."""

    @abstractmethod
    def _text(self, row: StepRow) -> str:
        """Return the text to add for a step."""


class CsvLines(Lines):
    """A table: a row a step, a column for each layer and statistic.

    The first row settles the columns. A cell is empty where nothing was seen.
    """

    _columns: list[str] | None = None
    _is_warned = False

    def _check(self, first: str) -> None:
        header = next(csv.reader([first]), [])
        if not header:
            return
        expected = [*COLUMNS, *_cells(self._layers)]
        missing = [column for column in expected if column not in header]
        known = set(expected)
        further = [c for c in header if c not in known and not self._may_be_functional(c)]
        if missing or further:
            which = f"lacks {missing[0]!r}" if missing else f"has {further[0]!r}"
            raise InspectionError(
                f"{str(self.path)!r} is a table of something else: its header {which}, "
                f"{len(missing)} columns are missing and {len(further)} unknown. It was written of "
                "another model, selection or version: give another path, or move it away"
            )
        self._columns = header

    def _may_be_functional(self, column: str) -> bool:
        layer, colon, statistic = column.rpartition(":")
        return bool(colon) and statistic in STATISTICS and layer.rpartition(".")[0] in self._layers

    def _text(self, row: StepRow) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if self._columns is None:
            self._columns = [*COLUMNS, *_cells(dict.fromkeys((*self._layers, *row.layers)))]
            writer.writerow(self._columns)
        cells: dict[str, Any] = {
            "step": row.step,
            "loss": row.loss,
            "gradient_norm": row.gradient_norm,
            "update_ratio": row.update_ratio,
        }
        for statistic in STATISTICS:
            numbers = row.values[statistic].tolist()
            for layer, number in zip(row.layers, numbers, strict=True):
                cells[f"{layer}:{statistic}"] = "" if math.isnan(number) else number
        self._warn_of_new(row, cells)
        writer.writerow([cells.get(column, "") for column in self._columns])
        return text.getvalue()

    def _warn_of_new(self, row: StepRow, cells: Iterable[str]) -> None:
        new = set(cells).difference(self._columns or ())
        if new and not self._is_warned:
            self._is_warned = True
            layers = sorted({column.rpartition(":")[0] for column in new})
            warnings.warn(
                f"step {row.step} has layers that the header of {str(self.path)!r} does not know: "
                f"{', '.join(layers[:3])}. They are left out of it; json=... writes them, and the "
                "history has them",
                ModelHealthWarning,
                stacklevel=5,
            )


class JsonLines(Lines):
    """A JSON object a step, on a line of its own; ``null`` where nothing was seen.

    Beside the columns of the table it has the origin of what is no number, and the numbers of
    forward passes and of optimizer steps. A loss that is no number is a string: ``"nan"``.
    """

    def _check(self, first: str) -> None:
        try:
            fits = not first or {*COLUMNS, "layers"} <= json.loads(first).keys()
        except (ValueError, AttributeError):
            fits = False
        if not fits:
            raise InspectionError(
                f"{str(self.path)!r} holds something else than lines of a monitor: give another "
                "path, or move it away"
            )

    def _text(self, row: StepRow) -> str:
        numbers = {statistic: row.values[statistic].tolist() for statistic in STATISTICS}
        layers = {
            layer: {name: _plain(values[at]) for name, values in numbers.items()}
            for at, layer in enumerate(row.layers)
        }
        data = {
            "step": row.step,
            "loss": _named(row.loss),
            "gradient_norm": _named(row.gradient_norm),
            "update_ratio": _plain(row.update_ratio),
            "passes": row.passes,
            "optimizer_steps": row.optimizer_steps,
            "origin": None if row.origin is None else vars(row.origin),
            "began": list(row.began),
            "layers": layers,
        }
        return json.dumps(data, allow_nan=False) + "\n"


def _cells(layers: Iterable[str]) -> list[str]:
    return [f"{layer}:{statistic}" for layer in layers for statistic in STATISTICS]


def _plain(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _named(value: float | None) -> float | str | None:
    """Return a number, or what it is called where JSON has no number for it."""
    return value if value is None or math.isfinite(value) else str(value)


class Function:
    """Calls ``function(step, numbers)``."""

    failures = 0
    """How many steps in a row it did not take."""
    is_warned = False

    def __init__(self, destination: Callable[[int, dict[str, float]], object]) -> None:
        self._destination = destination

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step by their names."""
        self._destination(step, dict(numbers))

    def __str__(self) -> str:
        return str(getattr(self._destination, "__name__", type(self._destination).__name__))


class TensorBoard(Function):
    """Adds scalars, and histograms, to a `SummaryWriter` of torch or of tensorboardX."""

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
        chosen = (statistics,) if isinstance(statistics, str) else tuple(statistics or ())
        for statistic in chosen:
            require_statistic(statistic)
        self._statistics = WRITTEN if statistics is None else chosen
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
            if self._histograms and isinstance(writer, TensorBoard):
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
