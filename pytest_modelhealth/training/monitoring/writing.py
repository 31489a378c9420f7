"""Writes the numbers of each watched step to a table, to TensorBoard or to a function."""

from __future__ import annotations

import csv
import io
import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

from pytest_modelhealth.errors import InspectionError, ModelHealthWarning
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

    Raises:
        InspectionError: `path` is no path.
    """

    def __init__(self, path: Any, layers: Sequence[str]) -> None:
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise InspectionError(
                f"csv must be the path of the file to write, such as 'health.csv', not {path!r}"
            )
        self.path = Path(path)
        self._layers = layers
        self._file: IO[bytes] | None = None
        self._columns: list[str] = []
        self._is_warned = False

    def open(self) -> None:
        """Open the file.

        Raises:
            InspectionError: it cannot be written, or is the table of another model.
        """
        try:
            data = self.path.read_bytes() if self.path.exists() else b""
            data = data[: data.rfind(b"\n") + 1]
            header = data.partition(b"\n")[0].decode(errors="replace")
            self._columns = next(csv.reader([header]), [])
            missing = [name for name in _names(self._layers) if name not in set(self._columns)]
            if self._columns and missing:
                raise InspectionError(
                    f"{str(self.path)!r} is a table of something else: its header lacks "
                    f"{missing[0]!r}. Give another path, or move it away"
                )
            self._file = self.path.open("ab", buffering=0)
            self._file.truncate(len(data))
        except OSError as error:
            raise InspectionError(f"cannot write {str(self.path)!r}: {error}") from error

    def close(self) -> None:
        """Close the file."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def write(self, row: StepRow) -> None:
        """Add a row. A file that cannot be written any longer is left alone, with a warning."""
        if self._file is None:
            return
        is_new = not self._columns
        if is_new:
            self._columns = _names(dict.fromkeys((*self._layers, *row.layers)))
        text = io.StringIO()
        writer = csv.DictWriter(
            text, self._columns, restval="", extrasaction="ignore", lineterminator="\n"
        )
        if is_new:
            writer.writeheader()
        cells: dict[str, Any] = {name: getattr(row, name) for name in COLUMNS}
        for statistic in STATISTICS:
            for layer, number in zip(row.layers, row.values[statistic].tolist(), strict=True):
                cells[f"{layer}:{statistic}"] = "" if math.isnan(number) else number
        writer.writerow(cells)
        late = sorted({name.rpartition(":")[0] for name in cells.keys() - set(self._columns)})
        if late and not self._is_warned:
            self._is_warned = True
            warnings.warn(
                f"step {row.step} has layers that the header of {str(self.path)!r} does not know: "
                f"{', '.join(late[:3])}. They are left out of it; the history has them",
                ModelHealthWarning,
                stacklevel=4,
            )
        try:
            self._file.write(text.getvalue().encode())
        except OSError as error:
            self.close()
            warnings.warn(
                f"cannot write {str(self.path)!r} any longer, after step {row.step}: {error}; the "
                "training goes on, and the monitor keeps its history",
                ModelHealthWarning,
                stacklevel=4,
            )


def _names(layers: Iterable[str]) -> list[str]:
    return [*COLUMNS, *(f"{layer}:{name}" for layer in layers for name in STATISTICS)]


WRITTEN = (
    "activation_rms",
    "dead_fraction",
    "gradient_norm",
    "parameter_gradient_norm",
    "update_ratio",
)
"""The statistics of a layer that are written unless others are asked for."""

_MOST_FAILURES = 3


class Scalars:
    """An observer of a monitor that writes to TensorBoard, or calls functions.

    ``modelhealth/loss``, ``modelhealth/gradient_norm`` and ``modelhealth/update_ratio`` are of the
    whole model, ``modelhealth/encoder.0/gradient_norm`` is of a layer. Written are layers that hold
    no others, and those with parameters of their own; the model itself goes by its type's name.

    Args:
        to: a writer or function, or a list or tuple of them; ``None`` is none.
        model_type: name of the model's type.
        statistics: of each layer.

    Raises:
        InspectionError: something is no destination, or there is no such statistic.
    """

    def __init__(self, to: Any, model_type: str, statistics: Iterable[str] | None = None) -> None:
        destinations = [] if to is None else to if isinstance(to, list | tuple) else [to]
        self.writers = [(destination, _write_to(destination)) for destination in destinations]
        self._failures = [0] * len(self.writers)
        self._model_type = model_type
        chosen = WRITTEN if statistics is None else statistics
        self._statistics = (chosen,) if isinstance(chosen, str) else tuple(chosen)
        for statistic in self._statistics:
            require_statistic(statistic)

    def __call__(self, row: StepRow) -> None:
        """Write the numbers of a step."""
        numbers = dict(self._numbers(row))
        for at, (destination, write) in enumerate(self.writers):
            if self._failures[at] == _MOST_FAILURES:
                continue
            try:
                write(row.step, dict(numbers))
            except Exception as error:  # noqa: BLE001 - another library's: the training goes on
                self._failures[at] += 1
                if self._failures[at] == 1:
                    name = getattr(destination, "__name__", type(destination).__name__)
                    warnings.warn(
                        f"{name} did not take the numbers of step {row.step}: "
                        f"{type(error).__name__}: {error}. The training goes on, and the monitor "
                        f"keeps its history; after {_MOST_FAILURES} failures nothing more is "
                        "written there",
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


def _write_to(destination: Any) -> Callable[[int, dict[str, float]], object]:
    """Return what takes the number of a step, and its numbers by their names."""
    add = getattr(destination, "add_scalar", None)  # of TensorBoard's
    if add is not None and not isinstance(destination, type):
        return lambda step, numbers: [add(name, value, step) for name, value in numbers.items()]
    if callable(destination) and not isinstance(destination, type):
        return cast("Callable[[int, dict[str, float]], object]", destination)
    raise InspectionError(
        f"to={destination!r} ({type(destination).__name__}) is nothing that numbers can be "
        "written to. Give a SummaryWriter of TensorBoard, a function of the step and a dictionary "
        "of numbers by name (for any other logger: to=lambda step, numbers: run.log(numbers)), or "
        "a list of them."
    )
