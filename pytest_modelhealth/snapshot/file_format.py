"""The snapshot file in plain text: a section a device and dtype, a line a layer and a tensor.

::

    modelhealth snapshot, format 2
    test: test_model.py::test_no_drift

    === cpu float32 ===
    model: Classifier
    recorded: pytest-modelhealth 0.1.0, torch 2.13.0
    noise: measured, epsilon 1.2e-07
    loss: 2.302585(2)

    [layers]    type    activation  status    calls
    fc1         Linear  -           observed      1

    [activations]  dtype    shape  count            mean  ...
    fc1            float32  64x10    640  0.0123456(2)  ...

    end

A digit in parentheses is the noise of the number before it, in units of its last place. Layers
stand in the order in which they returned, so those inside a layer come before it, and those never
called last. The last line tells a whole file from a truncated one. Reading executes nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_modelhealth import __version__
from pytest_modelhealth.report import ROLES
from pytest_modelhealth.snapshot import uncertainty

VERSION = 2
"""The format that `dump` writes; `load` reads format 1 too, which has no noise."""

_TITLE = "modelhealth snapshot, format "
_PROFILE = re.compile(r"=== (.+) ===")
_HEADER = ("model", "recorded", "noise", "loss")
_OLD_HEADER = ("test", "model", "recorded", "loss")
_NOISE = re.compile(r"(not )?measured, epsilon (\S+)")
_END = "end"
_CELL = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')
_PLAIN = re.compile(r"[A-Za-z0-9_.-]+")
_CONFLICT = ("<<<<<<<", "|||||||", "=======", ">>>>>>>")

DOUBLE = 1e-10
"""A machine epsilon below this is that of float64."""

REAL = ("mean", "std", "min", "max", "rms")
FRACTIONS = ("zeros", "dead")


class SnapshotFormatError(ValueError):
    """A text is no snapshot that this version can read; the message says where and why."""


class FutureFormatError(SnapshotFormatError):
    """A snapshot was written by a later version of the plugin."""


@dataclass(frozen=True)
class LayerLine:
    """What a snapshot keeps of a layer itself.

    Args:
        type: name of its class, or of the function.
        status: what became of it.
        calls: how often it was called.
        activation: canonical name of the activation function it is, ``""`` for none.
    """

    type: str
    status: str
    calls: int
    activation: str = ""


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
        noise: how far rounding moves each statistic; without those where that is not known.
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
    noise: Mapping[str, float] = field(default_factory=dict)


Tensors = Mapping[str, Mapping[str, TensorLine]]


@dataclass(frozen=True)
class Snapshot:
    """One section of a snapshot file.

    Args:
        profile: device and dtype, ``"cpu float32"``.
        model: class name of the model.
        recorded: versions; for people, never compared.
        calibrated: whether the noise of its numbers was measured.
        epsilon: machine epsilon of the coarsest dtype that the model computed in.
        loss: value of the loss; ``None`` where there was none.
        loss_noise: its noise, where that is known.
        layers: by name, in the order of the file.
        tensors: by role, then by name, which is the layer's, followed by a dot and the tensor's
            own name where the role has several. A role without tensors is missing.
        version: the format it was read from.
    """

    profile: str
    model: str
    recorded: str
    calibrated: bool
    epsilon: float
    loss: float | None
    layers: Mapping[str, LayerLine]
    tensors: Tensors
    loss_noise: float | None = None
    version: int = VERSION


@dataclass(frozen=True)
class SnapshotFile:
    """A snapshot file.

    Args:
        test: the test it belongs to, and which of the test's snapshots it is.
        snapshots: a section a device and dtype profile, by the profile.
    """

    test: str
    snapshots: Mapping[str, Snapshot]


def layer_of(role: str, name: str) -> str:
    """Return the layer of a tensor; the own name of a parameter or buffer never has a dot."""
    has_own_name = role in ("parameters", "parameter_gradients", "buffers")
    return name.rpartition(".")[0] if has_own_name else name


# The cells of a line, and how each is written and read.


def percentage(
    fraction: float | None, noise: float | None = None, _digits: int | None = None
) -> str:
    """Spell a fraction as the file does."""
    if fraction is None:
        return "-"
    return (
        f"{uncertainty.spell(100 * fraction, 100 * noise)}%" if noise else f"{100 * fraction:.2f}%"
    )


def _read_percentage(cell: str) -> tuple[float | None, float | None]:
    if cell == "-":
        return None, None
    if not cell.endswith("%"):
        raise ValueError(cell)
    value, noise = uncertainty.read(cell.removesuffix("%"))
    return value / 100, noise and noise / 100


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
    write: Callable[..., str]
    read: Callable[[str], Any]
    has_noise: bool = False

    def pad(self, cell: str) -> str:
        return cell.ljust(-self.width) if self.width < 0 else cell.rjust(self.width)

    def cell(self, line: Any) -> str:
        value = getattr(line, self.name)
        if not self.has_noise:
            return self.write(value)
        return self.write(value, line.noise.get(self.name), _digits(line.dtype))


def _digits(dtype: str) -> int:
    """Return how many digits to write of a number that has no noise."""
    return 17 if dtype in ("float64", "complex128") else uncertainty.PLAIN_DIGITS


def _or_dash(text: str) -> str:
    return _quote(text) if text else "-"


_LAYER_COLUMNS = (
    _Column("type", -24, _quote, _unquote),
    _Column("activation", -10, _or_dash, lambda cell: "" if cell == "-" else _unquote(cell)),
    _Column("status", -14, _quote, _unquote),
    _Column("calls", 5, str, int),
)
_OLD_LAYER_COLUMNS = tuple(column for column in _LAYER_COLUMNS if column.name != "activation")
_TENSOR_COLUMNS = (
    _Column("dtype", -8, str, str),
    _Column("shape", -12, str, str),
    _Column("count", 9, str, int),
    *(_Column(name, 15, uncertainty.spell, uncertainty.read, has_noise=True) for name in REAL),
    *(_Column(name, 8, percentage, _read_percentage, has_noise=True) for name in FRACTIONS),
    *(_Column(name, 3, str, int) for name in ("nan", "inf")),
)


# Writing.


def dump(file: SnapshotFile) -> str:
    """Return the text of a snapshot file."""
    lines = [f"{_TITLE}{VERSION}", f"test: {_on_one_line(file.test)}"]
    for snapshot in file.snapshots.values():
        lines += ["", *_section(snapshot)]
    return "\n".join([*lines, "", _END, ""])


def _section(snapshot: Snapshot) -> Iterator[str]:
    loss, noise = snapshot.loss, snapshot.loss_noise
    digits = _digits("float64" if snapshot.epsilon < DOUBLE else "")
    yield f"=== {snapshot.profile} ==="
    yield f"model: {_on_one_line(snapshot.model)}"
    yield f"recorded: {snapshot.recorded}"
    yield f"noise: {'' if snapshot.calibrated else 'not '}measured, epsilon {snapshot.epsilon:.2g}"
    yield f"loss: {'none' if loss is None else uncertainty.spell(loss, noise, digits)}"
    yield from _table("layers", _LAYER_COLUMNS, snapshot.layers)
    for role, tensors in snapshot.tensors.items():
        yield from _table(role, _TENSOR_COLUMNS, tensors)


def _on_one_line(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)


def _table(title: str, columns: Iterable[_Column], lines: Mapping[str, object]) -> list[str]:
    title = f"[{title}]"
    longest = max(map(len, [title, *map(_quote, lines)]))
    first = _Column(title, -math.ceil(longest / 10) * 10, _quote, _unquote)
    rows = ["  ".join(column.pad(column.name) for column in (first, *columns)).rstrip()]
    for name, line in lines.items():
        cells = [first.pad(_quote(name))]
        cells += [column.pad(column.cell(line)) for column in columns]
        rows.append("  ".join(cells).rstrip())
    return ["", *rows]


# Reading.


def load(text: str) -> SnapshotFile:
    """Return the snapshot file that `text` spells.

    Raises:
        SnapshotFormatError: it spells none, is incomplete, or has another format version.
    """
    file, problems = load_sound(text)
    if problems:
        raise problems[0]
    return file


def load_sound(text: str) -> tuple[SnapshotFile, list[SnapshotFormatError]]:
    """Return the sections of a file that can be read, and why others cannot.

    Raises:
        SnapshotFormatError: none can: it is no snapshot file, or of a later format.
    """
    lines = text.rstrip("\n").split("\n")
    version = _version(lines[0])
    test = _header_value(lines, 1, "test")
    problems: list[SnapshotFormatError] = []
    if lines[-1] != _END:
        problems.append(
            _error(len(lines), f"the file is truncated: {_END!r} should be its last line")
        )
    for row, line in enumerate(lines):
        if line.startswith(_CONFLICT):
            problems.append(_error(row + 1, f"a merge was not resolved: {_excerpt(line)}"))
            break
    body = lines[: -1 if lines[-1] == _END else None]
    snapshots: dict[str, Snapshot] = {}
    for start, stop in _spans(body, version):
        try:
            snapshot = _load_section(body[:stop], start, version)
        except SnapshotFormatError as error:
            problems.append(error)
        else:
            if snapshot.profile in snapshots:
                problems.append(_error(start + 1, f"there are two sections {snapshot.profile!r}"))
            snapshots[snapshot.profile] = snapshot
    if lines[-1] != _END and version != 1 and snapshots:
        snapshots.pop(profiles_in(text)[-1], None)  # where it was cut, nobody can tell
    return SnapshotFile(test, snapshots), problems


def profiles_in(text: str) -> list[str]:
    """Return the profiles that a text has sections of, readable or not."""
    return [found[1] for line in text.split("\n") if (found := _PROFILE.fullmatch(line))]


def _spans(lines: list[str], version: int) -> Iterator[tuple[int, int]]:
    """Yield the first row of each section, and the row after its last."""
    if version == 1:
        yield 0, len(lines)
        return
    starts = [row for row, line in enumerate(lines) if _PROFILE.fullmatch(line)]
    strangers = [row for row in range(2, starts[0] if starts else len(lines)) if lines[row]]
    if strangers or not starts:
        row = strangers[0] if strangers else len(lines)
        text = lines[row] if row < len(lines) else ""
        raise _error(row + 1, f"'=== device dtype ===' should be here, not {_excerpt(text)}")
    yield from zip(starts, [*starts[1:], len(lines)], strict=True)


def _load_section(lines: list[str], start: int, version: int) -> Snapshot:
    names = _OLD_HEADER if version == 1 else _HEADER
    header = {key: _header_value(lines, start + row, key) for row, key in enumerate(names, start=1)}
    layers: dict[str, LayerLine] = {}
    tensors: dict[str, dict[str, TensorLine]] = {}
    title = ""
    for row in range(start + len(names) + 1, len(lines)):
        line = lines[row]
        if line.startswith("["):
            title = _table_title(line, row)
        elif line and title == "layers":
            columns = _OLD_LAYER_COLUMNS if version == 1 else _LAYER_COLUMNS
            name, cells, _ = _cells(line, row, columns)
            layers[name] = LayerLine(**cells)
        elif line:
            name, cells, noise = _cells(line, row, _TENSOR_COLUMNS)
            tensors.setdefault(title, {})[name] = TensorLine(**cells, noise=noise)
    loss_row = start + 1 + names.index("loss")
    loss: tuple[float | None, float | None] = (None, None)
    if header["loss"] != "none":
        loss = _read(uncertainty.read, header["loss"], loss_row)
    if version == 1:
        recorded, profile, calibrated = _old_profile(header["recorded"], tensors)
        epsilon = 0.0
    else:
        found = _PROFILE.fullmatch(lines[start])
        profile, recorded = found[1] if found else "", header["recorded"]
        measured = _NOISE.fullmatch(header["noise"])
        if measured is None:
            raise _error(start + 4, f"{_excerpt(header['noise'])} says nothing of a noise")
        calibrated, epsilon = not measured[1], _read(float, measured[2], start + 3)
    return Snapshot(
        profile=profile,
        model=header["model"],
        recorded=recorded,
        calibrated=calibrated,
        epsilon=epsilon,
        loss=loss[0],
        loss_noise=loss[1],
        layers=layers,
        tensors=tensors,
        version=version,
    )


def _old_profile(recorded: str, tensors: Tensors) -> tuple[str, str, bool]:
    """Return versions and profile of a section of format 1, and that it is not calibrated."""
    _plugin, _torch, *devices = recorded.split(", ")
    dtypes = [tensor.dtype for tensor in tensors.get("activations", {}).values()]
    return recorded, profile_of(devices, dtypes), False


def profile_of(devices: Iterable[str], dtypes: Iterable[str]) -> str:
    """Return the profile of a run: its devices, and the floating dtype of most activations."""
    floating = [dtype for dtype in dtypes if "float" in dtype or "complex" in dtype]
    # Of equally frequent ones the first by name, so that the choice does not hang on the order.
    dtype = max(sorted(set(floating)), key=floating.count, default="")
    return " ".join([*sorted(set(devices)), dtype]).strip() or "unknown"


def _version(line: str) -> int:
    version = line.removeprefix(_TITLE)
    if version == line:
        raise _error(1, f"'{_TITLE}{VERSION}' should be here, not {_excerpt(line)}")
    if version not in ("1", str(VERSION)):
        message = (
            f"format {_excerpt(version)} was written by another version of the plugin; "
            f"pytest-modelhealth {__version__} reads formats 1 and {VERSION}"
        )
        raise FutureFormatError(f"line 1: {message}")
    return int(version)


def _header_value(lines: list[str], row: int, key: str) -> str:
    line = lines[row] if row < len(lines) else ""
    value = line.removeprefix(f"{key}: ")
    if value == line:
        raise _error(row + 1, f"'{key}: ...' should be here, not {_excerpt(line)}")
    return value


def _table_title(line: str, row: int) -> str:
    title = line.partition("]")[0].removeprefix("[")
    if title not in ("layers", *ROLES):
        raise _error(row + 1, f"there is no table {_excerpt(title)}")
    return title


def _cells(
    line: str, row: int, columns: tuple[_Column, ...]
) -> tuple[str, dict[str, Any], dict[str, float]]:
    """Return the name of a line, its values, and the noise of those that have one."""
    cells = _CELL.findall(line)
    if len(cells) != len(columns) + 1:
        raise _error(
            row + 1,
            f"a name and {len(columns)} values should be here, not {_excerpt(line)}",
        )
    values: dict[str, Any] = {}
    noise: dict[str, float] = {}
    for column, cell in zip(columns, cells[1:], strict=True):
        found = _read(column.read, cell, row)
        if column.has_noise:
            found, uncertain = found
            if uncertain is not None:
                noise[column.name] = uncertain
        values[column.name] = found
    return _read(_unquote, cells[0], row), values, noise


def _read(read: Callable[[str], Any], cell: str, row: int) -> Any:
    try:
        return read(cell)
    except ValueError:
        raise _error(row + 1, f"{_excerpt(cell)} is no value of its column") from None


def _error(line_number: int, message: str) -> SnapshotFormatError:
    return SnapshotFormatError(f"line {line_number}: {message}")


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:38] + "..")
