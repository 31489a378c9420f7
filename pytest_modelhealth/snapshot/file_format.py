"""The snapshot file in plain text: a section a device and dtype, a line a layer.

::

    modelhealth snapshot, format 5
    test: test_model.py::test_no_drift
    # in, out, grad, .weight, ...: shape,mean,std,min,max; ~mean:4 4 times the usual noise

    === cpu float32 ===
    model: Classifier
    recorded: pytest-modelhealth 0.1.0, torch 2.13.0
    noise: measured, epsilon 2^-23
    loss: 2.302585

    layer=fc1 type=Linear out=64x10,0.0123456,0.5772157,-1.732051,1.618034,~min:4 .bias=10,0,0,0,0
    layer=fc2 type=Linear ...

    end

Layers stand in the order in which they returned, so those inside a layer come before it. A line is
cells of ``key=value`` between blanks; what has a blank in it is quoted as in a URL (``%20``). The
noise of a number is in the file only where it is more than usual; a zero with noise is ``~min:1``
at least, one without is exact. What is usual is not written (dtype, calls, zeros); what differs is
a ``key:value``. The last line tells a whole file from a truncated one. Reading executes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from pytest_modelhealth import __version__
from pytest_modelhealth.report import ROLES, UNCALLED, LayerRecord, Observation, Status
from pytest_modelhealth.snapshot.snapshot import Snapshot, of_roles, shape_text
from pytest_modelhealth.snapshot.tolerances import REAL, judges_zeros
from pytest_modelhealth.statistics import TensorStatistics
from pytest_modelhealth.statistics.tensor_statistics import ExponentCounts
from pytest_modelhealth.tolerance import LOSS, TensorName

VERSION = 5

_TITLE = "modelhealth snapshot, format "
_LEGEND = "# in, out, grad, .weight, ...: shape,mean,std,min,max; ~mean:4 4 times the usual noise"
_END = "end"
_CONFLICT = ("<<<<<<<", "|||||||", "=======", ">>>>>>>")
_UNQUOTED = "/:;,()[]<>{}@!$&*+?|'#^~"
_TIED = "tied."
_COUNTS = {"zeros": "zero_count", "count": "count", "nan": "nan_count", "inf": "inf_count"}

UNKNOWN_TEST = "-"
"""Stands in a snapshot that no test recorded; it fits every test."""

_ROLES = {
    "parameter_gradients": ".{}.grad",
    "parameters": ".{}",
    "buffers": "buffer.{}",
    "inputs": "in",
    "activations": "out",
    "gradients": "grad",
}
"""How a line names the tensors of each role."""


@dataclass(frozen=True)
class SnapshotFile:
    """A snapshot file.

    Args:
        test: the test it belongs to, and which of the test's snapshots it is.
        snapshots: a section a device and dtype profile, by the profile.
    """

    test: str
    snapshots: Mapping[str, Snapshot]


class SnapshotFormatError(ValueError):
    """A text is no snapshot that this version can read; the message says where and why.

    Args:
        message: what is wrong, and what should be there.
        line: number of the line; 0 where no line is to blame.
        age: -1 where an older version of the plugin wrote it, 1 where a later one did.
    """

    def __init__(self, message: str, line: int = 0, age: int = 0) -> None:
        super().__init__(f"line {line}: {message}" if line else message)
        self.message, self.line, self.age = message, line, age

    def at(self, path: str) -> str:
        """Return the message as one of a file, which editors and terminals open at its line."""
        return f"{path}:{self.line}: {self.message}" if path and self.line else str(self)


def dump(file: SnapshotFile) -> str:
    """Return the text of a snapshot file."""
    lines = [f"{_TITLE}{VERSION}", f"test: {_on_one_line(file.test)}", _LEGEND]
    for snapshot in file.snapshots.values():
        lines += ["", *_section(snapshot)]
    return "\n".join([*lines, "", _END, ""])


def _on_one_line(text: str) -> str:
    return text if text.isprintable() else repr(text)


def _section(snapshot: Snapshot) -> Iterator[str]:
    exponent = f"2^{math.log2(snapshot.epsilon):.0f}" if snapshot.epsilon else "0"
    digits = 9 if snapshot.epsilon > 1e-9 else 17
    loss = snapshot.observation.loss
    times = snapshot.noise.get(LOSS, {}).get("value")
    yield f"=== {snapshot.profile} ==="
    yield f"model: {_on_one_line(snapshot.observation.model_type)}"
    yield f"recorded: {snapshot.recorded}"
    yield f"noise: {'' if snapshot.calibrated else 'not '}measured, epsilon {exponent}"
    yield f"loss: {'none' if loss is None else f'{loss:.{digits}g}'}" + (
        f" ~{times:.12g}" if times else ""
    )
    yield ""
    for name, record in snapshot.layers.items():
        cells = {"layer": name, "type": record.type_name}
        if record.activation:
            cells["fn"] = record.activation
        if record.status != Status.OBSERVED:
            cells["status"] = record.status
        if record.calls != _usual_calls(record.status):
            cells["calls"] = str(record.calls)
        for key, tensor in snapshot.tensors[name].items():
            cells[_ROLES[key[1]].format(key[2])] = _cell(snapshot, key, tensor, digits)
        cells |= {f"{_TIED}{own}": full for own, full in record.tied.items()}
        yield " ".join(f"{_quoted(key)}={_quoted(value)}" for key, value in cells.items())


def _quoted(text: str) -> str:
    return quote(text, safe=_UNQUOTED)


def _cell(snapshot: Snapshot, name: TensorName, tensor: TensorStatistics, digits: int) -> str:
    parts = [shape_text(tensor.shape)]
    parts += [f"{getattr(tensor, one) + 0.0:.{digits}g}" for one in REAL]
    usual = _usual(snapshot.profile, tensor.shape)
    seen = {key: getattr(tensor, field) for key, field in _COUNTS.items()}
    seen |= {"dtype": tensor.dtype, "zeros": seen["zeros"] * judges_zeros(name)}
    parts += [f"{key}:{value}" for key, value in seen.items() if value != usual[key]]
    parts += [f"~{key}:{times:.12g}" for key, times in snapshot.noise.get(name, {}).items()]
    return ",".join(parts)


def _usual(profile: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return what a tensor is unless its cell says otherwise."""
    dtype = profile.rpartition(" ")[2]
    return {"dtype": dtype, "count": math.prod(shape), "zeros": 0, "nan": 0, "inf": 0}


def _usual_calls(status: str) -> int:
    return 0 if status in UNCALLED else 1


def load(text: str) -> SnapshotFile:
    """Return the snapshot file that a text spells.

    Raises:
        SnapshotFormatError: it spells none, is incomplete, or has another format version.
    """
    lines = text.rstrip("\n").split("\n")
    for row, line in enumerate(lines):
        if line.startswith(_CONFLICT):
            raise SnapshotFormatError(
                f"a merge was not resolved, there is the marker {_excerpt(line)}: take one side "
                "(git checkout --ours or --theirs)",
                row + 1,
            )
    _check_version(lines[0])
    test = _header(lines, 1, "test")
    starts = [row for row, line in enumerate(lines) if profiles_in(line)]
    content = (row for row, line in enumerate(lines) if row > 1 and line and line[0] != "#")
    first = next(content, len(lines))
    if first not in starts:
        raise _expected("'=== device dtype ==='", "".join(lines[first : first + 1]), first)
    if lines[-1] != _END:
        message = f"the file is truncated: {_END!r} should be its last line"
        raise SnapshotFormatError(message, len(lines))
    snapshots: dict[str, Snapshot] = {}
    for start, stop in zip(starts, [*starts[1:], len(lines) - 1], strict=True):
        snapshot = _snapshot(lines[:stop], start)
        if snapshot.profile in snapshots:
            message = f"there are 2 sections {snapshot.profile!r}"
            raise SnapshotFormatError(message, start + 1)
        snapshots[snapshot.profile] = snapshot
    return SnapshotFile(test, snapshots)


def profiles_in(text: str) -> list[str]:
    """Return the profiles that a text has sections of, readable or not."""
    lines = text.split("\n")
    return [line[4:-4] for line in lines if line.startswith("=== ") and line.endswith(" ===")]


def _check_version(line: str) -> None:
    version = line.removeprefix(_TITLE)
    if version == line:
        raise _expected(f"'{_TITLE}{VERSION}'", line, 0)
    if version.isdecimal() and int(version) < VERSION:
        message = f"written by an older format ({version}); run with --snapshot-update"
        raise SnapshotFormatError(message, 1, -1)
    if version != str(VERSION):
        message = (
            f"format {_excerpt(version)} is that of a later version of the plugin; "
            f"pytest-modelhealth {__version__} reads format {VERSION}"
        )
        raise SnapshotFormatError(message, 1, 1)


def _header(lines: list[str], row: int, key: str) -> str:
    line = lines[row] if row < len(lines) else ""
    if not line.startswith(f"{key}: "):
        raise _expected(f"'{key}: ...'", line, row)
    return line.removeprefix(f"{key}: ")


def _snapshot(lines: list[str], start: int) -> Snapshot:
    """Return the section that begins in the row `start` and goes to the last line."""
    model, recorded, noise, loss = (
        _header(lines, start + number, key)
        for number, key in enumerate(("model", "recorded", "noise", "loss"), start=1)
    )
    profile = lines[start].strip("= ")
    noises: dict[TensorName, dict[str, float]] = {}
    try:
        measured, _, exponent = noise.partition("measured, epsilon ")
        epsilon = 0.0 if exponent == "0" else 2.0 ** int(exponent.removeprefix("2^"))
        value, _, times = loss.partition(" ~")
        number = None if value == "none" else float(value)
        if times:
            noises[LOSS] = {"value": float(times)}
    except ValueError:
        expected = "'noise: measured, epsilon 2^-23' and 'loss: 0.25'"
        raise _expected(expected, f"{noise}; {loss}", start + 3) from None
    layers: dict[str, LayerRecord] = {}
    for row in range(start + 5, len(lines)):
        if not lines[row]:
            continue
        try:
            record = _layer(lines[row], profile, noises, place=row)
        except (ValueError, KeyError):
            raise _expected(f"a layer, {_EXAMPLE!r},", lines[row], row) from None
        if record.name in layers:
            raise _expected("another layer", record.name, row)
        layers[record.name] = record
    observation = Observation(layers, model, loss=number)
    return Snapshot(profile, recorded, not measured, epsilon, observation, noises)


_EXAMPLE = "layer=fc type=Linear out=64x10,0.1,0.9,-2,2"


def _layer(
    line: str, profile: str, noises: dict[TensorName, dict[str, float]], place: int
) -> LayerRecord:
    """Return what a line says of a layer; some error where it says nothing."""
    parts = (cell.partition("=") for cell in line.split())
    cells = {unquote(key): unquote(value) for key, _, value in parts}
    name, type_name = cells.pop("layer"), cells.pop("type")
    status = cells.pop("status", Status.OBSERVED.value)
    calls, activation = cells.pop("calls", str(_usual_calls(status))), cells.pop("fn", None)
    tied = {k.removeprefix(_TIED): cells.pop(k) for k in [*cells] if k.startswith(_TIED)}
    tensors: dict[str, dict[str, TensorStatistics]] = {role: {} for role in ROLES}
    for key, cell in cells.items():
        role, own = _role(key)
        tensors[role][own], noise = _tensor(cell, profile)
        if noise:
            noises[name, role, own] = noise
    return LayerRecord(
        name=name,
        type_name=type_name,
        status=Status(status),
        activation=activation,
        entered=place if _count(calls) else None,
        calls=_count(calls),
        tied=tied,
        **of_roles(tensors),
    )


def _role(key: str) -> tuple[str, str]:
    for role, form in _ROLES.items():
        before, braces, after = form.partition("{}")
        own = key[len(before) : len(key) - len(after)] if braces else ""
        if key == form.format(own) and (own or not braces):
            return role, own
    raise KeyError(key)


def _tensor(cell: str, profile: str) -> tuple[TensorStatistics, dict[str, float]]:
    """Return what a cell says of a tensor, and of its noise."""
    shape_cell, mean, std, least, most, *options = cell.split(",")
    shape = () if shape_cell == "()" else tuple(map(_count, shape_cell.split("x")))
    fields, noise = _usual(profile, shape), dict[str, float]()
    for option in options:
        key, _, value = option.partition(":")
        if key[0] == "~":
            noise[key[1:]] = float(value)
        elif key in fields:
            fields[key] = value if key == "dtype" else _count(value)
        else:
            raise KeyError(key)
    fields |= dict(zip(REAL, map(float, (mean, std, least, most)), strict=True))
    return statistics(shape, fields), noise


def statistics(shape: tuple[int, ...], fields: Mapping[str, Any]) -> TensorStatistics:
    """Return statistics of which no more is known than a file has."""
    return TensorStatistics(
        count=fields["count"],
        nan_count=fields["nan"],
        positive_inf_count=fields["inf"],
        negative_inf_count=0,
        zero_count=fields["zeros"],
        mean=fields["mean"],
        std=fields["std"],
        min=fields["min"],
        max=fields["max"],
        exponents=ExponentCounts(),
        units=None,
        shape=shape,
        dtype=fields["dtype"],
        device="",
    )


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


def _expected(what: str, found: str, row: int) -> SnapshotFormatError:
    return SnapshotFormatError(f"{what} should be here, not {_excerpt(found)}", row + 1)


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:38] + "..")
