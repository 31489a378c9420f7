"""The snapshot file in plain text: a section a device and dtype, a line a layer.

::

    modelhealth snapshot, format 4
    test: test_model.py::test_no_drift
    # in, out, grad, .weight, ...: shape,mean,std,min..max; ~4: 4 times the usual noise

    === cpu float32 ===
    model: Classifier
    recorded: pytest-modelhealth 0.1.0, torch 2.13.0
    noise: measured, epsilon 2^-23
    loss: 2.302585

    layer=fc1 type=Linear out=64x10,0.0123456,0.5772157,-1.732051~4..1.618034 .bias=10,0,0,0..0
    layer=fc2 type=Linear ...

    end

Layers stand in the order in which they returned, so those inside a layer come before it. A line is
cells of ``key=value`` between blanks; what has a blank in it is quoted as in a URL (``%20``). A
number is rounded by no more than a tenth of its tolerance. Its noise is in the file only where it
is more than usual (`tolerances.Noise`): ``~4`` is four times that. ``~0`` is a zero with noise,
``0`` an exact one. What is usual is not written (dtype, calls, zeros); what differs is a
``key:value``. The last line tells a whole file from a truncated one. Reading executes nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote, unquote

from pytest_modelhealth import __version__
from pytest_modelhealth.report import UNCALLED, Status
from pytest_modelhealth.snapshot.snapshot import (
    FRACTIONS,
    REAL,
    LayerLine,
    Snapshot,
    SnapshotFile,
    TensorKey,
    TensorLine,
    shape_text,
)
from pytest_modelhealth.snapshot.tolerances import Tolerances

VERSION = 4

_TITLE = "modelhealth snapshot, format "
_LEGEND = "# in, out, grad, .weight, ...: shape,mean,std,min..max; ~4: 4 times the usual noise"
_PROFILE = re.compile(r"=== (.+) ===")
_HEADER = ("model", "recorded", "noise", "loss")
_NOISE = re.compile(r"(not )?measured, epsilon (?:0|2\^(-?\d+))")
_END = "end"
_CONFLICT = ("<<<<<<<", "|||||||", "=======", ">>>>>>>")
_UNQUOTED = "/:;,()[]<>{}@!$&*+?|'#^"
_TIED = "tied{}"

UNKNOWN_TEST = "-"
"""Stands in a snapshot that no test recorded; it fits every test."""

PART = 10
"""A number is rounded by no more than its tolerance by this."""

_ROLES = {
    "parameter_gradients": ".{}.grad",
    "parameters": ".{}",
    "buffers": "buffer.{}",
    "inputs": "in",
    "activations": "out",
    "gradients": "grad",
}
"""How a line names the tensors of each role."""


class SnapshotFormatError(ValueError):
    """A text is no snapshot that this version can read; the message says where and why.

    Args:
        message: what is wrong, and what should be there.
        line: number of the line; 0 where no line is to blame.
    """

    def __init__(self, message: str, line: int = 0) -> None:
        super().__init__(message, line)
        self.message = message
        self.line = line

    def __str__(self) -> str:
        return f"line {self.line}: {self.message}" if self.line else self.message

    def at(self, path: str) -> str:
        """Return the message as one of a file, which editors and terminals open at its line."""
        return f"{path}:{self.line}: {self.message}" if path and self.line else str(self)


class FutureFormatError(SnapshotFormatError):
    """A snapshot was written by a later version of the plugin."""


def dump(file: SnapshotFile) -> str:
    """Return the text of a snapshot file."""
    lines = [f"{_TITLE}{VERSION}", f"test: {_on_one_line(file.test)}", _LEGEND]
    for snapshot in file.snapshots.values():
        lines += ["", *_section(snapshot)]
    return "\n".join([*lines, "", _END, ""])


def _on_one_line(text: str) -> str:
    return text if text.isprintable() else repr(text)


def _section(snapshot: Snapshot) -> Iterator[str]:
    epsilon = f"2^{math.log2(snapshot.epsilon):.0f}" if snapshot.epsilon else "0"
    tolerances = Tolerances(snapshot)
    loss, times = snapshot.loss, snapshot.loss_noise
    yield f"=== {snapshot.profile} ==="
    yield f"model: {_on_one_line(snapshot.model)}"
    yield f"recorded: {snapshot.recorded}"
    yield f"noise: {'' if snapshot.calibrated else 'not '}measured, epsilon {epsilon}"
    allowed = 0.0 if loss is None else tolerances.loss(loss, times).distance
    yield f"loss: {'none' if loss is None else _number(loss, allowed, times)}"
    yield ""
    for name, line in snapshot.layers.items():
        cells = {"layer": name, "type": line.type}
        if line.activation:
            cells["fn"] = line.activation
        if line.status != Status.OBSERVED:
            cells["status"] = line.status
        if line.calls != _usual_calls(line.status):
            cells["calls"] = str(line.calls)
        for (role, own), tensor in line.tensors.items():
            key = _ROLES[role].format(own)
            cells[key] = _tensor(snapshot.profile, tolerances, name, role, tensor)
        cells |= {_TIED.format(f".{own}"): full for own, full in line.tied.items()}
        yield " ".join(f"{_quoted(key)}={_quoted(value)}" for key, value in cells.items())


def _quoted(text: str) -> str:
    return quote(text, safe=_UNQUOTED)


def _number(value: float, tolerance: float, times: float | None) -> str:
    """Spell a number to the digits that its tolerance can tell, and its multiple of the noise."""
    suffix = f"~{_without_zeros(f'{times:.1f}')}" if times and times > 1 else ""
    if not math.isfinite(value) or not 0 < tolerance < math.inf:
        return format(value + 0.0, ".17g") + suffix
    place = math.floor(math.log10(2 * tolerance / PART))
    rounded = round(value, -place)
    if not rounded:
        return f"~0{suffix}" if value or times else "0"
    exponent = math.floor(math.log10(abs(rounded)))
    if -5 < exponent < 15:
        return _without_zeros(f"{rounded:.{max(-place, 0)}f}") + suffix
    mantissa, _, power = f"{rounded:.{max(exponent - place, 0)}e}".partition("e")
    return f"{_without_zeros(mantissa)}e{int(power)}{suffix}"


def _without_zeros(digits: str) -> str:
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def _tensor(profile: str, tolerances: Tolerances, layer: str, role: str, tensor: TensorLine) -> str:
    numbers = []
    for name in REAL:
        value = getattr(tensor, name)
        allowance = tolerances.of(role, layer, tensor, name, value)
        # A noise that the tolerance does not hang on tells nobody anything.
        times = tensor.noise.get(name) if allowance.noise else None
        numbers.append(_number(value, allowance.distance, times))
    mean, std, least, most = numbers
    parts = [shape_text(tensor.shape), mean, std, f"{least}..{most}"]
    usual = _usual(profile, role, tensor.shape)
    for name in FRACTIONS:
        value, noise = getattr(tensor, name), tensor.noise.get(name)
        if value != usual[name] or noise:
            parts.append(f"{name}:{_fraction(value)}" + (f"~{_fraction(noise)}" if noise else ""))
    exact = ("dtype", "count", "nan", "inf")
    parts += [
        f"{key}:{getattr(tensor, key)}" for key in exact if getattr(tensor, key) != usual[key]
    ]
    return ",".join(parts)


def _fraction(value: float | None) -> str:
    return "-" if value is None else _without_zeros(f"{value:.4f}")


def _usual(profile: str, role: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return what a tensor is unless its cell says otherwise."""
    dead = 0.0 if role in ("activations", "gradients") else None
    dtype = profile.rpartition(" ")[2]
    count = math.prod(shape)
    return {"zeros": 0.0, "dead": dead, "dtype": dtype, "count": count, "nan": 0, "inf": 0}


def _usual_calls(status: str) -> int:
    return 0 if status in UNCALLED else 1


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
        SnapshotFormatError: none can: it is no snapshot file, or of another format.
    """
    lines = text.rstrip("\n").split("\n")
    for row, line in enumerate(lines):
        if line.startswith(_CONFLICT):
            message = (
                f"a merge was not resolved, there is the marker {_excerpt(line)}: take one side "
                "(git checkout --ours or --theirs)"
            )
            return SnapshotFile(UNKNOWN_TEST, {}), [SnapshotFormatError(message, row + 1)]
    _check_version(lines[0])
    test = _header_value(lines, 1, "test")
    starts = [row for row, line in enumerate(lines) if _PROFILE.fullmatch(line)]
    rows = (row for row, line in enumerate(lines) if row > 1 and line and line[0] != "#")
    first = next(rows, len(lines))
    if first not in starts:
        raise _expected("'=== device dtype ==='", "".join(lines[first : first + 1]), first)
    problems: list[SnapshotFormatError] = []
    whole = lines[-1] == _END
    if not whole:
        message = f"the file is truncated: {_END!r} should be its last line"
        problems.append(SnapshotFormatError(message, len(lines)))
    snapshots: dict[str, Snapshot] = {}
    profiles = profiles_in(text)
    for start, stop in zip(starts, [*starts[1:], len(lines) - whole], strict=True):
        try:
            snapshot = _snapshot(lines[:stop], start)
            count = profiles.count(snapshot.profile)
            if count > 1:
                message = f"there are {count} sections {snapshot.profile!r}"
                raise SnapshotFormatError(message, start + 1)
            snapshots[snapshot.profile] = snapshot
        except SnapshotFormatError as error:
            problems.append(error)
    if not whole:
        snapshots.pop(profiles[-1], None)  # where it was cut, nobody can tell
    return SnapshotFile(test, snapshots), problems


def profiles_in(text: str) -> list[str]:
    """Return the profiles that a text has sections of, readable or not."""
    return [found[1] for line in text.split("\n") if (found := _PROFILE.fullmatch(line))]


def _check_version(line: str) -> None:
    version = line.removeprefix(_TITLE)
    if version == line:
        raise _expected(f"'{_TITLE}{VERSION}'", line, 0)
    if version.isdecimal() and int(version) < VERSION:
        message = f"written by an older format ({version}); run with --snapshot-update"
        raise SnapshotFormatError(message, 1)
    if version != str(VERSION):
        message = (
            f"format {_excerpt(version)} is that of a later version of the plugin; "
            f"pytest-modelhealth {__version__} reads format {VERSION}"
        )
        raise FutureFormatError(message, 1)


def _header_value(lines: list[str], row: int, key: str) -> str:
    line = lines[row] if row < len(lines) else ""
    value = line.removeprefix(f"{key}: ")
    if value == line:
        raise _expected(f"'{key}: ...'", line, row)
    return value


def _snapshot(lines: list[str], start: int) -> Snapshot:
    """Return the section that begins in the row `start` and goes to the last line."""
    model, recorded, noise, loss = (
        _header_value(lines, row, key) for row, key in enumerate(_HEADER, start=start + 1)
    )
    measured = _NOISE.fullmatch(noise)
    if measured is None:
        raise _expected("'noise: measured, epsilon 2^-23' or 'not measured'", noise, start + 3)
    try:
        value, times = (None, None) if loss == "none" else _read_number(loss)
    except ValueError:
        what = "a number such as 0.25, or 0.25~4 with its noise"
        raise _expected(what, loss, start + 4) from None
    profile = lines[start].strip("= ")
    layers: dict[str, LayerLine] = {}
    for row in range(start + len(_HEADER) + 1, len(lines)):
        if lines[row]:
            name, layer = _read_line(lines[row], row, profile)
            if name in layers:
                raise _expected("another layer", name, row)
            layers[name] = layer
    epsilon = 2.0 ** int(measured[2]) if measured[2] else 0.0
    return Snapshot(profile, model, recorded, not measured[1], epsilon, value, layers, times)


def _read_line(text: str, row: int, profile: str) -> tuple[str, LayerLine]:
    """Return the name of a layer, and what its line says of it."""
    parts = (cell.partition("=") for cell in text.split())
    cells = {unquote(key): unquote(value) for key, _, value in parts}
    if list(cells)[:2] != ["layer", "type"]:
        raise _expected("'layer=' and 'type='", text, row)
    name, kind = cells.pop("layer"), cells.pop("type")
    status = cells.pop("status", Status.OBSERVED.value)
    calls, activation = cells.pop("calls", str(_usual_calls(status))), cells.pop("fn", "")
    if not calls.isdecimal():
        raise _expected("a whole number", calls, row)
    tensors: dict[TensorKey, TensorLine] = {}
    tied: dict[str, str] = {}
    for key, cell in cells.items():
        if key.startswith(_TIED.format(".")):
            tied[key.removeprefix(_TIED.format("."))] = cell
            continue
        role, own_name = _read_key(key, row)
        try:
            tensors[role, own_name] = _read_tensor(profile, role, cell)
        except ValueError:
            expected = "'64x10,0.1,0.9,-2..2' (shape, mean, std, min..max)"
            raise _expected(expected, f"{key}={cell}", row) from None
    return name, LayerLine(kind, status, int(calls), activation, tied, tensors)


def _read_key(key: str, row: int) -> TensorKey:
    for role, form in _ROLES.items():
        before, braces, after = form.partition("{}")
        own_name = key[len(before) : len(key) - len(after)] if braces else ""
        if key == form.format(own_name) and (own_name or not braces):
            return role, own_name
    raise _expected("'in', 'out', 'grad', '.weight', '.weight.grad' or 'buffer.mean'", key, row)


def _read_tensor(profile: str, role: str, cell: str) -> TensorLine:
    """Return what a cell says of a tensor; a `ValueError` where it is none."""
    shape_cell, mean, std, extremes, *options = cell.split(",")
    shape = () if shape_cell == "()" else tuple(map(_count, shape_cell.split("x")))
    least, _, most = extremes.partition("..")
    fields = _usual(profile, role, shape)
    noise: dict[str, float] = {}
    for name, number in zip(REAL, (mean, std, least, most), strict=True):
        fields[name], times = _read_number(number)
        noise |= {} if times is None else {name: times}
    for option in options:
        key, _, value = option.partition(":")
        if key in FRACTIONS:
            part, _, uncertain = value.partition("~")
            fields[key] = None if part == "-" else float(part)
            noise |= {key: float(uncertain)} if uncertain else {}
        elif key in ("dtype", "count", "nan", "inf"):
            fields[key] = value if key == "dtype" else _count(value)
        else:
            raise ValueError(option)
    return TensorLine(shape=shape, noise=noise, **fields)


def _read_number(cell: str) -> tuple[float, float | None]:
    """Return a number, and how many times the usual noise it has where that is spelled."""
    if cell.startswith("~0"):
        return 0.0, float(cell[3:] or 1)
    value, tilde, times = cell.partition("~")
    return float(value), float(times) if tilde else None


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


def _expected(what: str, found: str, row: int) -> SnapshotFormatError:
    return SnapshotFormatError(f"{what} should be here, not {_excerpt(found)}", row + 1)


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:38] + "..")
