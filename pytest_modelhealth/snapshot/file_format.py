"""The snapshot file: a line a layer, then a line a tensor, in plain text that diffs well.

::

    modelhealth snapshot, format 1
    test: test_model.py::test_no_drift
    model: Classifier
    recorded: pytest-modelhealth 0.1.0, torch 2.13.0, cpu
    loss: 2.3026

    [layers]    type    status    calls
    fc1         Linear  observed      1

    [activations]  dtype    shape  count     mean  ...
    fc1            float32  64x10    640  0.01234  ...

    end

Layers stand in the order in which they returned, so those inside a layer come before it, and those
never called last. The last line tells a whole file from a truncated one. Reading executes nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pytest_modelhealth import __version__
from pytest_modelhealth.report import ROLES, LayerRecord, Observation
from pytest_modelhealth.statistics import TensorStatistics

VERSION = 1
"""The format that `dump` writes and the only one that `load` reads."""

DIGITS = 5
"""Significant digits of reals: rounding moves a value by 5e-5 of itself at most, a tenth of the
tightest tolerance."""

_TITLE = "modelhealth snapshot, format "
_HEADER = ("test", "model", "recorded", "loss")
_END = "end"
_CELL = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')
_PLAIN = re.compile(r"[A-Za-z0-9_.-]+")


class SnapshotFormatError(ValueError):
    """A text is no snapshot that this version can read; the message says where and why."""


@dataclass(frozen=True)
class LayerLine:
    """What a snapshot keeps of a layer itself."""

    type: str
    status: str
    calls: int


@dataclass(frozen=True)
class TensorLine:
    """What a snapshot keeps of a tensor.

    Args:
        dtype: as in `TensorStatistics`.
        shape: ``64x10``, that of a scalar ``()``.
        count: as in `TensorStatistics`, as are `mean`, `std`, `min`, `max` and `rms`.
        zeros: the zero fraction.
        dead: the dead fraction; ``None`` for a tensor without units.
        nan: number of NaNs.
        inf: number of infinities of either sign.
    """

    dtype: str
    shape: str
    count: int
    mean: float
    std: float
    min: float
    max: float
    rms: float
    zeros: float
    dead: float | None
    nan: int
    inf: int


Tensors = Mapping[str, Mapping[str, TensorLine]]


@dataclass(frozen=True)
class Snapshot:
    """The content of a snapshot file.

    Args:
        test: the test it belongs to, and which of the test's snapshots it is.
        model: class name of the model.
        recorded: versions and devices; for people, never compared.
        loss: value of the loss; ``None`` where there was none.
        layers: by name, in the order of the file.
        tensors: by role, then by name, which is the layer's, followed by a dot and the tensor's
            own name where the role has several. A role without tensors is missing.
    """

    test: str
    model: str
    recorded: str
    loss: float | None
    layers: Mapping[str, LayerLine]
    tensors: Tensors


def layer_of(role: str, name: str) -> str:
    """Return the layer of a tensor; the own name of a parameter or buffer never has a dot."""
    has_own_name = role in ("parameters", "parameter_gradients", "buffers")
    return name.rpartition(".")[0] if has_own_name else name


# From an observation.


def from_observation(observation: Observation, test: str) -> Snapshot:
    """Return what a snapshot keeps of `observation`, at full precision."""
    records = sorted(observation.layers.values(), key=_completed)
    tensors: dict[str, dict[str, TensorLine]] = {role: {} for role in ROLES}
    devices = set()
    for record in records:
        for role, name, statistics in _statistics(record):
            tensors[role][name] = _tensor_line(statistics)
            devices.add(statistics.device.partition(":")[0])
    versions = (f"pytest-modelhealth {__version__}", f"torch {torch.__version__}")
    return Snapshot(
        test=test,
        model=observation.model_type,
        recorded=", ".join([*versions, *sorted(devices)]),
        loss=observation.loss,
        layers={r.name: LayerLine(r.type_name, r.status.value, r.calls) for r in records},
        tensors={role: lines for role, lines in tensors.items() if lines},
    )


def _completed(record: LayerRecord) -> float:
    return math.inf if record.completed is None else record.completed


def _statistics(record: LayerRecord) -> Iterator[tuple[str, str, TensorStatistics]]:
    for role in ROLES:
        # What goes into an inner layer came out of another one; only the batch is news.
        if role == "inputs" and record.name:
            continue
        for own_name, statistics in record.tensors(role).items():
            yield role, ".".join(filter(None, (record.name, own_name))), statistics


def _tensor_line(s: TensorStatistics) -> TensorLine:
    return TensorLine(
        dtype=s.dtype,
        shape="x".join(map(str, s.shape)) or "()",
        count=s.count,
        mean=_significant(s.mean, s.rms),
        std=_significant(s.std, s.rms),
        min=_significant(s.min, s.rms),
        max=_significant(s.max, s.rms),
        rms=s.rms,
        zeros=s.zero_fraction,
        dead=s.dead_fraction,
        nan=s.nan_count,
        inf=s.inf_count,
    )


def _significant(value: float, scale: float) -> float:
    """Return `value` without its digits below a millionth of `scale`, which are mere rounding."""
    if not scale or not math.isfinite(scale) or not math.isfinite(value):
        return value
    return round(value, 6 - math.floor(math.log10(scale)))


# The cells of a line, and how each is written and read.


def number(value: float) -> str:
    """Spell a real number as the file does."""
    return format(value + 0.0, f".{DIGITS}g")  # the sum turns -0.0 into 0.0


def percentage(fraction: float | None) -> str:
    """Spell a fraction as the file does."""
    return "-" if fraction is None else f"{100 * fraction:.2f}%"


def _read_percentage(cell: str) -> float | None:
    if cell == "-":
        return None
    if not cell.endswith("%"):
        raise ValueError(cell)
    return float(cell.removesuffix("%")) / 100


def _quote(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _unquote(cell: str) -> str:
    return str(json.loads(cell)) if cell.startswith('"') else cell


@dataclass(frozen=True)
class _Column:
    """One column; a negative `width` is flush left.

    Widths are fixed, so that one new value does not move every line of its section; a value that
    is longer moves the rest of its own line only.
    """

    name: str
    width: int
    write: Callable[[Any], str]
    read: Callable[[str], Any]

    def pad(self, cell: str) -> str:
        return cell.ljust(-self.width) if self.width < 0 else cell.rjust(self.width)


_LAYER_COLUMNS = (
    _Column("type", -24, _quote, _unquote),
    _Column("status", -14, _quote, _unquote),
    _Column("calls", 5, str, int),
)
_TENSOR_COLUMNS = (
    _Column("dtype", -8, str, str),
    _Column("shape", -12, str, str),
    _Column("count", 9, str, int),
    *(_Column(name, 11, number, float) for name in ("mean", "std", "min", "max", "rms")),
    *(_Column(name, 7, percentage, _read_percentage) for name in ("zeros", "dead")),
    *(_Column(name, 3, str, int) for name in ("nan", "inf")),
)


# Writing.


def dump(snapshot: Snapshot) -> str:
    """Return the text of a snapshot file."""
    lines = [
        f"{_TITLE}{VERSION}",
        f"test: {_on_one_line(snapshot.test)}",
        f"model: {_on_one_line(snapshot.model)}",
        f"recorded: {snapshot.recorded}",
        f"loss: {'none' if snapshot.loss is None else number(snapshot.loss)}",
        *_section("layers", _LAYER_COLUMNS, snapshot.layers),
    ]
    for role, tensors in snapshot.tensors.items():
        lines += _section(role, _TENSOR_COLUMNS, tensors)
    return "\n".join([*lines, "", _END, ""])


def _on_one_line(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)


def _section(title: str, columns: Iterable[_Column], lines: Mapping[str, object]) -> list[str]:
    title = f"[{title}]"
    longest = max(map(len, [title, *map(_quote, lines)]))
    first = _Column(title, -math.ceil(longest / 10) * 10, _quote, _unquote)
    rows = ["  ".join(column.pad(column.name) for column in (first, *columns)).rstrip()]
    for name, line in lines.items():
        cells = [first.pad(_quote(name))]
        cells += [column.pad(column.write(getattr(line, column.name))) for column in columns]
        rows.append("  ".join(cells).rstrip())
    return ["", *rows]


# Reading.


def load(text: str) -> Snapshot:
    """Return the snapshot that `text` spells.

    Raises:
        SnapshotFormatError: it spells none, is incomplete, or has another format version.
    """
    lines = text.rstrip("\n").split("\n")
    _require_version(lines[0])
    header = {key: _header_value(lines, row, key) for row, key in enumerate(_HEADER, start=1)}
    loss = header["loss"]
    if lines[-1] != _END:
        raise _error(len(lines), f"the file is truncated: {_END!r} should be its last line")
    layers: dict[str, LayerLine] = {}
    tensors: dict[str, dict[str, TensorLine]] = {}
    section = ""
    for row, line in enumerate(lines[:-1]):
        if row <= len(_HEADER) or not line:
            continue
        if line.startswith("["):
            section = _section_title(line, row)
        elif section == "layers":
            name, cells = _cells(line, row, _LAYER_COLUMNS)
            layers[name] = LayerLine(**cells)
        else:
            name, cells = _cells(line, row, _TENSOR_COLUMNS)
            tensors.setdefault(section, {})[name] = TensorLine(**cells)
    return Snapshot(
        test=header["test"],
        model=header["model"],
        recorded=header["recorded"],
        loss=None if loss == "none" else _read(float, loss, _HEADER.index("loss") + 1),
        layers=layers,
        tensors=tensors,
    )


def _require_version(line: str) -> None:
    version = line.removeprefix(_TITLE)
    if version == line:
        raise _error(1, f"'{_TITLE}{VERSION}' should be here, not {_excerpt(line)}")
    if version != str(VERSION):
        raise _error(
            1,
            f"format {_excerpt(version)} was written by another version of the plugin; "
            f"pytest-modelhealth {__version__} reads format {VERSION}",
        )


def _header_value(lines: list[str], row: int, key: str) -> str:
    line = lines[row] if row < len(lines) else ""
    value = line.removeprefix(f"{key}: ")
    if value == line:
        raise _error(row + 1, f"'{key}: ...' should be here, not {_excerpt(line)}")
    return value


def _section_title(line: str, row: int) -> str:
    title = line.partition("]")[0].removeprefix("[")
    if title not in ("layers", *ROLES):
        raise _error(row + 1, f"there is no section {_excerpt(title)}")
    return title


def _cells(line: str, row: int, columns: tuple[_Column, ...]) -> tuple[str, dict[str, Any]]:
    cells = _CELL.findall(line)
    if len(cells) != len(columns) + 1:
        raise _error(
            row + 1,
            f"a name and {len(columns)} values should be here, not {_excerpt(line)}",
        )
    values = [_read(c.read, cell, row) for c, cell in zip(columns, cells[1:], strict=True)]
    names = [column.name for column in columns]
    return _read(_unquote, cells[0], row), dict(zip(names, values, strict=True))


def _read(read: Callable[[str], Any], cell: str, row: int) -> Any:
    try:
        return read(cell)
    except ValueError:
        raise _error(row + 1, f"{_excerpt(cell)} is no value of its column") from None


def _error(line_number: int, message: str) -> SnapshotFormatError:
    return SnapshotFormatError(f"line {line_number}: {message}")


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:38] + "..")
