"""Writes the numbers of each watched step to a table, to TensorBoard or to a function."""

from __future__ import annotations

import csv
import io
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from mmap import mmap
from pathlib import Path
from typing import IO, Any

from pytest_modelhealth.errors import InspectionError, ModelHealthWarning
from pytest_modelhealth.training.libraries import is_of
from pytest_modelhealth.training.monitoring.row import STATISTICS, StepRow, require_statistic

COLUMNS = ("step", "loss", "gradient_norm", "update_ratio")
"""The first columns; one for each layer and statistic follows, ``encoder.0:gradient_norm``."""


class CsvLines:
    """A table to which a row is added at once for each watched step.

    The first row settles the columns; a cell is empty where nothing was seen. A file that is there
    is continued; an unfinished last line, which a crash left, is removed.

    Args:
        path: where it lies.
        layers: names of the layers that are known from the start.
    """

    def __init__(self, path: str | os.PathLike[str], layers: Sequence[str]) -> None:
        self.path = Path(path)
        self._layers = layers
        self._file: IO[bytes] | None = None
        self._columns: list[str] | None = None
        self._is_warned = False

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

    def _check(self, first: str) -> None:
        """Take the columns of a table that is there, if it is one of these layers."""
        header = next(csv.reader([first]), [])
        expected = (*COLUMNS, *_cells(self._layers))
        if header and (missing := set(expected).difference(header)):
            lacking = next(column for column in expected if column in missing)
            raise InspectionError(
                f"{str(self.path)!r} is a table of something else: its header lacks {lacking!r}, "
                f"{len(missing)} columns are missing. It was written of another model, selection "
                "or version: give another path, or move it away"
            )
        self._columns = header or None

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def write(self, row: StepRow) -> None:
        """Add a row. A file that cannot be written any longer is left alone, with a warning."""
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

    def _text(self, row: StepRow) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        if self._columns is None:
            self._columns = [*COLUMNS, *_cells(dict.fromkeys((*self._layers, *row.layers)))]
            writer.writerow(self._columns)
        cells: dict[str, Any] = {name: getattr(row, name) for name in COLUMNS}
        for statistic in STATISTICS:
            numbers = row.values[statistic].tolist()
            for layer, number in zip(row.layers, numbers, strict=True):
                cells[f"{layer}:{statistic}"] = "" if math.isnan(number) else number
        new = set(cells).difference(self._columns)
        if new and not self._is_warned:
            self._is_warned = True
            layers = sorted({column.rpartition(":")[0] for column in new})
            warnings.warn(
                f"step {row.step} has layers that the header of {str(self.path)!r} does not know: "
                f"{', '.join(layers[:3])}. They are left out of it; the history has them",
                ModelHealthWarning,
                stacklevel=4,
            )
        writer.writerow([cells.get(column, "") for column in self._columns])
        return text.getvalue()


def _cells(layers: Iterable[str]) -> list[str]:
    return [f"{layer}:{statistic}" for layer in layers for statistic in STATISTICS]


# Other destinations

Write = Callable[[int, dict[str, float]], object]
"""Takes the number of a step, and its numbers by their names."""

WRITTEN = (
    "activation_rms",
    "dead_fraction",
    "gradient_norm",
    "parameter_gradient_norm",
    "update_ratio",
)
"""The statistics of a layer that are written unless others are asked for."""

_MOST_FAILURES = 3


def writers_of(to: Any) -> list[tuple[str, Write]]:
    """Return what writes to a destination, or to several in a list or tuple, with their names.

    Raises:
        InspectionError: something is no destination.
    """
    if to is None:
        return []
    return [_writer(one) for one in (to if isinstance(to, list | tuple) else [to])]


def _writer(destination: Any) -> tuple[str, Write]:
    name = str(getattr(destination, "__name__", type(destination).__name__))
    is_tensorboard = is_of(destination, "torch.utils.tensorboard", "tensorboardX")
    if is_tensorboard and hasattr(destination, "add_scalar"):

        def write(step: int, numbers: dict[str, float]) -> None:
            for key, value in numbers.items():
                destination.add_scalar(key, value, step)

        return name, write
    if callable(destination) and not isinstance(destination, type):
        return name, destination
    raise InspectionError(
        f"to={destination!r} ({type(destination).__name__}) is nothing that numbers can be "
        "written to. Give a SummaryWriter of TensorBoard, a function of the step and a dictionary "
        "of numbers by name (for any other logger: to=lambda step, numbers: run.log(numbers)), or "
        "a list of them."
    )


class Scalars:
    """An observer of a monitor that writes to destinations.

    ``modelhealth/loss``, ``modelhealth/gradient_norm`` and ``modelhealth/update_ratio`` are of the
    whole model, ``modelhealth/encoder.0/gradient_norm`` is of a layer. Written are layers that hold
    no others, and those with parameters of their own; the model itself goes by its type's name.

    Args:
        writers: of the destinations.
        model_type: name of the model's type.
        statistics: of each layer.

    Raises:
        InspectionError: there is no such statistic.
    """

    def __init__(
        self,
        writers: Sequence[tuple[str, Write]],
        model_type: str,
        statistics: Iterable[str] | None = None,
    ) -> None:
        self._writers = list(writers)
        self._model_type = model_type
        chosen = (statistics,) if isinstance(statistics, str) else tuple(statistics or ())
        for statistic in chosen:
            require_statistic(statistic)
        self._statistics = WRITTEN if statistics is None else chosen
        self._failures = [0] * len(self._writers)  # in a row
        self._warned: set[int] = set()

    def __call__(self, row: StepRow) -> None:
        """Write the numbers of a step."""
        numbers = dict(self._numbers(row))
        for at, (name, write) in enumerate(self._writers):
            if self._failures[at] == _MOST_FAILURES:
                continue
            try:
                write(row.step, dict(numbers))
                self._failures[at] = 0
            except Exception as error:  # noqa: BLE001 - another library's: the training goes on
                self._failures[at] += 1
                if at not in self._warned:
                    self._warned.add(at)
                    warnings.warn(
                        f"{name} did not take the numbers of step {row.step}: "
                        f"{type(error).__name__}: {error}. The training goes on, and the monitor "
                        f"keeps its history; after {_MOST_FAILURES} failures in a row nothing more "
                        "is written there",
                        ModelHealthWarning,
                        stacklevel=4,
                    )

    def _numbers(self, row: StepRow) -> Iterator[tuple[str, float]]:
        if row.loss is not None:
            yield "modelhealth/loss", row.loss
        if any(not math.isnan(v) for v in row.values["parameter_gradient_norm"].tolist()):
            yield "modelhealth/gradient_norm", row.gradient_norm
        if not math.isnan(row.update_ratio):
            yield "modelhealth/update_ratio", row.update_ratio
        holders = {layer.rpartition(".")[0] for layer in row.layers if layer}
        owns = [not math.isnan(norm) for norm in row.values["parameter_norm"].tolist()]
        for statistic in self._statistics:
            values = row.values[statistic].tolist()
            for layer, value, is_owner in zip(row.layers, values, owns, strict=True):
                if (layer not in holders or is_owner) and not math.isnan(value):
                    yield f"modelhealth/{layer or self._model_type}/{statistic}", value
