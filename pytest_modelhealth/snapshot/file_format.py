"""The snapshot file in plain text: a section a device and dtype, a line a layer.

::

    modelhealth snapshot, format 3
    test: test_model.py::test_no_drift
    # shape mean std min..max, or shape value; ~4: 4 times the usual noise; ...

    === cpu float32 ===
    model: Classifier
    recorded: pytest-modelhealth 0.1.0, torch 2.13.0
    noise: measured, epsilon 2^-23
    loss: 2.302585

    fc1 Linear | in =out | out 64x10 0.0123456 0.5772157 -1.732051~4..1.618034 | .bias 10 0
    fc2 Linear | ...

    end

Layers stand in the order in which they returned, so those inside a layer come before it. A number
is rounded by no more than a tenth of its tolerance. Its noise is in the file only where it is more
than usual (`noise.Noise`): ``~4`` is four times that. ``~0`` is a zero with noise, ``0`` an exact
one. A parameter that is one of another layer is ``.weight tied embedding.weight``. What is usual is
not written (dtype, calls, zeros); what differs is a ``key:value``. The last line tells a whole file
from a truncated one. Reading executes nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from pytest_modelhealth import __version__
from pytest_modelhealth.report import UNCALLED, Status
from pytest_modelhealth.snapshot.snapshot import (
    FRACTIONS,
    OWN_NAMES,
    REAL,
    LayerLine,
    Snapshot,
    SnapshotFile,
    TensorKey,
    TensorLine,
    judges_zeros,
    shape_text,
)
from pytest_modelhealth.snapshot.tolerances import Tolerances

VERSION = 3

_TITLE = "modelhealth snapshot, format "
_LEGEND = (
    "# shape mean std min..max, or shape value; ~4: 4 times the usual noise; "
    "=: as above; =out: the output above"
)
_PROFILE = re.compile(r"=== (.+) ===")
_HEADER = ("model", "recorded", "noise", "loss")
_NOISE = re.compile(r"(not )?measured, epsilon (0|2\^-?\d+)")
_END = "end"
_CELL = re.compile(r'(?:[a-z]+:)?"(?:[^"\\]|\\.)*"|\S+')
_KEY = re.compile(r"[A-Za-z0-9_.-]+")
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_OPTION = re.compile(r"([a-z]+):(.+)")
_SHAPE = re.compile(r"\(\)|\d+(x\d+)*")
_NUMBER = re.compile(r"(nan|-?inf|~0|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)(?:~(\d+(?:\.5)?))?")
_PERCENTAGE = re.compile(r"(nan|\d+(?:\.\d+)?)%(?:~(\d+(?:\.\d+)?)%)?")
_CONFLICT = ("<<<<<<<", "|||||||", "=======", ">>>>>>>")
_DIGITS = 17
_TIED = "tied"

UNKNOWN_TEST = "-"
"""Stands in a snapshot that no test recorded; it fits every test."""

PART = 10
"""A number is rounded by no more than its tolerance by this."""

_ROLES = {
    "inputs": "in",
    "activations": "out",
    "gradients": "grad",
    "parameters": ".{}",
    "parameter_gradients": ".{}.grad",
    "buffers": "buffer.{}",
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


def percentage(fraction: float | None) -> str:
    """Spell a fraction for people."""
    return "-" if fraction is None else f"{100 * fraction:.2f}%"


def _quote(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text)


def _unquote(cell: str) -> str:
    return str(json.loads(cell)) if cell.startswith('"') else cell


def _on_one_line(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)


# Writing.


def dump(file: SnapshotFile) -> str:
    """Return the text of a snapshot file."""
    lines = [f"{_TITLE}{VERSION}", f"test: {_on_one_line(file.test)}", _LEGEND]
    for snapshot in file.snapshots.values():
        lines += ["", *_section(snapshot)]
    return "\n".join([*lines, "", _END, ""])


def _section(snapshot: Snapshot) -> Iterator[str]:
    epsilon = f"2^{math.log2(snapshot.epsilon):.0f}" if snapshot.epsilon else "0"
    yield f"=== {snapshot.profile} ==="
    yield f"model: {_on_one_line(snapshot.model)}"
    yield f"recorded: {snapshot.recorded}"
    yield f"noise: {'' if snapshot.calibrated else 'not '}measured, epsilon {epsilon}"
    yield f"loss: {_loss(snapshot)}"
    yield ""
    writer = _Writer(snapshot)
    for name, line in snapshot.layers.items():
        yield writer.line(name, line)


def _loss(snapshot: Snapshot) -> str:
    loss, times = snapshot.loss, snapshot.loss_noise
    if loss is None:
        return "none"
    return _number(loss, Tolerances(snapshot).loss(loss, times).distance, times)


def _number(value: float, tolerance: float, times: float | None) -> str:
    """Spell a number to the digits that its tolerance can tell, and its multiple of the noise."""
    suffix = f"~{_without_zeros(f'{times:.1f}')}" if times and times > 1 else ""
    if not math.isfinite(value) or not 0 < tolerance < math.inf:
        return format(value + 0.0, f".{_DIGITS}g") + suffix
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


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else _without_zeros(f"{100 * fraction:.2f}") + "%"


class _Writer:
    """Writes the lines of one section, each with what it has in common with the one above."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._dtype = snapshot.profile.rpartition(" ")[2]
        self._tolerances = Tolerances(snapshot)
        self._last: dict[str, TensorLine] = {}

    def line(self, name: str, line: LayerLine) -> str:
        head = [_quote(name), _quote(line.type)]
        if line.activation:
            head.append(f"fn:{_quote(line.activation)}")
        if line.status != Status.OBSERVED:
            head.append(f"status:{_quote(line.status)}")
        if line.calls != _usual_calls(line.status):
            head.append(f"calls:{line.calls}")
        groups = [self._group(name, line.tensors, key, one) for key, one in line.tensors.items()]
        self._last |= {role: t for (role, _), t in line.tensors.items() if role not in OWN_NAMES}
        ties = [f"{_key('parameters', own)} {_TIED} {_quote(to)}" for own, to in line.tied.items()]
        return " | ".join([" ".join(head), *groups, *ties])

    def _group(self, layer: str, line: Line, of: TensorKey, tensor: TensorLine) -> str:
        role, own_name = of
        key = _key(role, own_name)
        for word, other in _above(self._last, role, layer).items():
            if other is not None and _is_same(tensor, _reshaped(other, tensor.shape)):
                shape = [] if other.shape == tensor.shape else [shape_text(tensor.shape)]
                return " ".join([key, *shape, word])
        return " ".join([key, *self._cells(role, layer, own_name, line, tensor)])

    def _cells(
        self, role: str, layer: str, own_name: str, line: Line, tensor: TensorLine
    ) -> Iterator[str]:
        usual = _usual(role, own_name, self._dtype, line)
        if tensor.dtype != usual.dtype:
            yield f"dtype:{tensor.dtype}"
        if tensor.shape != usual.shape:
            yield shape_text(tensor.shape)
        if tensor.count != math.prod(tensor.shape):
            yield f"count:{tensor.count}"
        mean, std, least, most = (self._cell(role, layer, tensor, name) for name in REAL)
        constant = _is_constant(tensor)
        yield from (mean,) if constant else (mean, std, f"{least}..{most}")
        zeros = _usual_zeros(role, layer, mean) if constant else 0.0
        for name, nothing in (("zeros", zeros), ("dead", usual.dead)):
            value, noise = getattr(tensor, name), tensor.noise.get(name)
            if value != nothing or noise:
                yield f"{name}:{_percent(value)}" + (f"~{_percent(noise)}" if noise else "")
        for name in ("nan", "inf"):
            if getattr(tensor, name):
                yield f"{name}:{getattr(tensor, name)}"

    def _cell(self, role: str, layer: str, tensor: TensorLine, name: str) -> str:
        value = getattr(tensor, name)
        allowance = self._tolerances.of(role, layer, tensor, name, value)
        # A noise that the tolerance does not hang on tells nobody anything.
        times = tensor.noise.get(name) if allowance.noise else None
        return _number(value, allowance.distance, times)


def _key(role: str, own_name: str) -> str:
    key = _ROLES[role].format(own_name)
    return key if _KEY.fullmatch(key) else json.dumps(key)


# What is usual, and so not written.


@dataclass(frozen=True)
class _Usual:
    """What a tensor is unless its line says otherwise."""

    dtype: str
    shape: tuple[int, ...] | None
    dead: float | None


Line = Mapping[TensorKey, TensorLine]
"""The tensors of a layer."""


def _usual(role: str, own_name: str, dtype: str, line: Line) -> _Usual:
    """Return what is usual of a tensor: a gradient is like what it is the gradient of."""
    of = {"gradients": "activations", "parameter_gradients": "parameters"}.get(role, "")
    like = line.get((of, own_name))
    dead = 0.0 if role in ("activations", "gradients") else None
    return _Usual(like.dtype if like else dtype, like.shape if like else None, dead)


def _usual_calls(status: str) -> int:
    return 0 if status in UNCALLED else 1


def _usual_zeros(role: str, layer: str, value: str) -> float:
    """Return the zero fraction that is usual of a constant tensor, from its value as spelled."""
    return 1.0 if value == "0" and judges_zeros(role, layer) else 0.0


def _as_input(tensor: TensorLine | None, layer: str) -> TensorLine | None:
    """Return the line of a tensor where it goes into a layer within the model."""
    if tensor is None or not layer:
        return None
    noise = {name: tensor.noise[name] for name in REAL if name in tensor.noise}
    return replace(tensor, zeros=0.0, dead=None, noise=noise)


def _above(last: Mapping[str, TensorLine], role: str, layer: str) -> dict[str, TensorLine | None]:
    """Return the tensors of the line above that a tensor may be equal to, each by its word."""
    if role in OWN_NAMES:
        return {}
    output = _as_input(last.get("activations"), layer) if role == "inputs" else None
    return {"=": last.get(role), "=out": output}


def _reshaped(tensor: TensorLine, shape: tuple[int, ...]) -> TensorLine:
    """Return a tensor with as many elements in another shape, or as it is."""
    return replace(tensor, shape=shape) if math.prod(shape) == tensor.count else tensor


def _is_same(tensor: TensorLine, other: TensorLine) -> bool:
    """Whether two lines have the same numbers, whose noise then is the same too."""
    return replace(tensor, noise={}) == replace(other, noise={})


def _is_constant(tensor: TensorLine) -> bool:
    numbers = [getattr(tensor, name) for name in REAL]
    if tensor.noise.keys() & REAL:
        return False
    equal = tensor.mean == tensor.min == tensor.max and tensor.std == 0
    return equal or all(map(math.isnan, numbers))


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
        SnapshotFormatError: none can: it is no snapshot file, or of another format.
    """
    lines = text.rstrip("\n").split("\n")
    conflict = next((row for row, line in enumerate(lines) if line.startswith(_CONFLICT)), None)
    if conflict is not None:
        message = (
            f"a merge was not resolved, there is the marker {_excerpt(lines[conflict])}: take one "
            f"side (git checkout --ours or --theirs)"
        )
        return SnapshotFile(UNKNOWN_TEST, {}), [SnapshotFormatError(message, conflict + 1)]
    _check_version(lines[0])
    test = _header_value(lines, 1, "test")
    problems: list[SnapshotFormatError] = []
    whole = lines[-1] == _END
    if not whole:
        message = f"the file is truncated: {_END!r} should be its last line"
        problems.append(SnapshotFormatError(message, len(lines)))
    body = lines[:-1] if whole else lines
    snapshots: dict[str, Snapshot] = {}
    profiles = profiles_in(text)
    for start, stop in _spans(body):
        try:
            snapshot = _Reader(body, start, stop).snapshot()
        except SnapshotFormatError as error:
            problems.append(error)
            continue
        if profiles.count(snapshot.profile) > 1:
            message = f"there are {profiles.count(snapshot.profile)} sections {snapshot.profile!r}"
            problems.append(SnapshotFormatError(message, start + 1))
        else:
            snapshots[snapshot.profile] = snapshot
    if not whole:
        snapshots.pop(profiles[-1], None)  # where it was cut, nobody can tell
    return SnapshotFile(test, snapshots), problems


def profiles_in(text: str) -> list[str]:
    """Return the profiles that a text has sections of, readable or not."""
    return [found[1] for line in text.split("\n") if (found := _PROFILE.fullmatch(line))]


def _spans(lines: list[str]) -> Iterator[tuple[int, int]]:
    """Yield the first row of each section, and the row after its last."""
    starts = [row for row, line in enumerate(lines) if _PROFILE.fullmatch(line)]
    for row in range(2, starts[0] if starts else len(lines) + 1):
        text = lines[row] if row < len(lines) else ""
        if row == len(lines) or (text and not text.startswith("#")):
            raise _expected("'=== device dtype ==='", text, row)
    yield from zip(starts, [*starts[1:], len(lines)], strict=True)


def _check_version(line: str) -> None:
    version = line.removeprefix(_TITLE)
    if version == line:
        raise _expected(f"'{_TITLE}{VERSION}'", line, 0)
    if version == str(VERSION):
        return
    if version.isdecimal() and int(version) < VERSION:
        message = f"format {version} is that of an earlier version of the plugin"
        raise SnapshotFormatError(message, 1)
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


class _Reader:
    """Reads one section: the rows from `start` up to `stop`."""

    def __init__(self, lines: list[str], start: int, stop: int) -> None:
        self._lines = lines[:stop]
        self._start = start
        self._row = start
        self._profile = lines[start].strip("= ")
        self._dtype = self._profile.rpartition(" ")[2]
        self._last: dict[str, TensorLine] = {}

    def snapshot(self) -> Snapshot:
        """Return the section."""
        header = {
            key: _header_value(self._lines, self._start + row, key)
            for row, key in enumerate(_HEADER, start=1)
        }
        self._row = self._start + 3
        measured = _NOISE.fullmatch(header["noise"])
        if measured is None:
            raise self._wrong("'noise: measured, epsilon 2^-23' or 'not measured'", header["noise"])
        self._row = self._start + 4
        loss, times = None, None
        if header["loss"] != "none":
            loss, times = self._number(header["loss"])
        layers = {}
        for row in range(self._start + len(_HEADER) + 1, len(self._lines)):
            self._row = row
            if self._lines[row]:
                name, line = self._line(self._lines[row])
                if name in layers:
                    raise self._wrong("another layer", name)
                layers[name] = line
        return Snapshot(
            profile=self._profile,
            model=header["model"],
            recorded=header["recorded"],
            calibrated=not measured[1],
            epsilon=2.0 ** int(measured[2][2:]) if measured[2] != "0" else 0.0,
            loss=loss,
            loss_noise=times,
            layers=layers,
        )

    def _line(self, text: str) -> tuple[str, LayerLine]:
        groups: list[list[str]] = [[]]
        for cell in _CELL.findall(text):
            if cell == "|":
                groups.append([])
            else:
                groups[-1].append(cell)
        plain, options = self._split(groups[0], ("fn", "status", "calls"))
        if len(plain) != 2:
            raise self._wrong("a name and a type", " ".join(plain))
        name, kind = map(self._unquoted, plain)
        status = self._unquoted(options.get("status", Status.OBSERVED.value))
        tensors: dict[TensorKey, TensorLine] = {}
        tied = {}
        for group in groups[1:]:
            role, own_name = self._key(group)
            if group[1:2] == [_TIED] and role == "parameters" and len(group) == 3:
                tied[own_name] = self._unquoted(group[2])
                continue
            tensors[role, own_name] = self._tensor(role, name, own_name, group[1:], tensors)
        self._last |= {role: t for (role, _), t in tensors.items() if role not in OWN_NAMES}
        calls = self._count(options.get("calls", str(_usual_calls(status))))
        activation = self._unquoted(options.get("fn", '""'))
        return name, LayerLine(kind, status, calls, activation, tied, tensors)

    def _key(self, group: list[str]) -> tuple[str, str]:
        key = self._unquoted(group[0]) if group else ""
        for role in ("parameter_gradients", "parameters", "buffers"):
            before, after = _ROLES[role].split("{}")
            own_name = key[len(before) : len(key) - len(after)]
            if key == f"{before}{own_name}{after}" and own_name:
                return role, own_name
        for role, word in _ROLES.items():
            if key == word:
                return role, ""
        raise self._wrong("'in', 'out', 'grad', '.weight', '.weight.grad' or 'buffer.mean'", key)

    def _tensor(
        self, role: str, layer: str, own_name: str, cells: list[str], line: Line
    ) -> TensorLine:
        if cells and cells[-1] in ("=", "=out"):
            above = _above(self._last, role, layer).get(cells[-1])
            if above is None or len(cells) > 2:
                raise self._wrong("numbers, as no line above has such a tensor,", " ".join(cells))
            return above if len(cells) == 1 else _reshaped(above, self._shape(cells[0]))
        plain, options = self._split(cells, ("dtype", "count", *FRACTIONS, "nan", "inf"))
        usual = _usual(role, own_name, self._dtype, line)
        shape = self._shape(plain.pop(0)) if len(plain) in (2, 4) else usual.shape
        if len(plain) not in (1, 3) or shape is None:
            raise self._wrong(
                "'64x10 0.1 0.9 -2..2' (shape, mean, std, min..max) or '10 0' (shape, value)",
                " ".join(cells),
            )
        numbers, noise = self._numbers(plain)
        zeros = _usual_zeros(role, layer, plain[0]) if len(plain) == 1 else 0.0
        fractions = {"zeros": zeros, "dead": usual.dead}
        for name in FRACTIONS:
            if name in options:
                fractions[name], uncertain = self._fraction(options[name])
                if uncertain is not None:
                    noise[name] = uncertain
        return TensorLine(
            dtype=options.get("dtype", usual.dtype),
            shape=shape,
            count=self._count(options.get("count", str(math.prod(shape)))),
            zeros=fractions["zeros"] or 0.0,
            dead=fractions["dead"],
            nan=self._count(options.get("nan", "0")),
            inf=self._count(options.get("inf", "0")),
            noise=noise,
            **numbers,
        )

    def _numbers(self, cells: list[str]) -> tuple[dict[str, float], dict[str, float]]:
        """Return the real statistics that one or three cells spell, and their noise."""
        if len(cells) == 1:
            value, _ = self._number(cells[0])
            spread = value if math.isnan(value) else 0.0
            return {"mean": value, "std": spread, "min": value, "max": value}, {}
        *moments, extremes = cells
        least, dots, most = extremes.partition("..")
        if not dots:
            raise self._wrong("min..max", extremes)
        found = {
            name: self._number(cell)
            for name, cell in zip(REAL, (*moments, least, most), strict=True)
        }
        noise = {name: times for name, (_, times) in found.items() if times is not None}
        return {name: value for name, (value, _) in found.items()}, noise

    def _split(self, cells: list[str], keys: tuple[str, ...]) -> tuple[list[str], dict[str, str]]:
        """Return the cells without a key, and the others by their keys."""
        found = [_OPTION.fullmatch(cell) for cell in cells]
        for option in found:
            if option and option[1] not in keys:
                raise self._wrong(" or ".join(f"'{key}:'" for key in keys), option[0])
        plain = [cell for cell, option in zip(cells, found, strict=True) if not option]
        return plain, {option[1]: option[2] for option in found if option}

    def _number(self, cell: str) -> tuple[float, float | None]:
        """Return a number, and how many times the usual noise it has where that is spelled."""
        found = _NUMBER.fullmatch(cell)
        if found is None:
            raise self._wrong("a number such as 0.25, or 0.25~4 with its noise", cell)
        if found[1] == "~0":
            return 0.0, float(found[2] or 1)
        return float(found[1]), float(found[2]) if found[2] else None

    def _fraction(self, cell: str) -> tuple[float | None, float | None]:
        if cell == "-":
            return None, None
        found = _PERCENTAGE.fullmatch(cell)
        if found is None:
            raise self._wrong("a percentage such as 12.5%", cell)
        return float(found[1]) / 100, float(found[2]) / 100 if found[2] else None

    def _count(self, cell: str) -> int:
        if not cell.isdecimal():
            raise self._wrong("a whole number", cell)
        return int(cell)

    def _shape(self, cell: str) -> tuple[int, ...]:
        if not _SHAPE.fullmatch(cell):
            raise self._wrong("a shape such as 64x10, or ()", cell)
        return () if cell == "()" else tuple(map(int, cell.split("x")))

    def _unquoted(self, cell: str) -> str:
        try:
            return _unquote(cell)
        except ValueError:
            raise self._wrong("a quoted name", cell) from None

    def _wrong(self, expected: str, found: str) -> SnapshotFormatError:
        return _expected(expected, found, self._row)


def _expected(what: str, found: str, row: int) -> SnapshotFormatError:
    return SnapshotFormatError(f"{what} should be here, not {_excerpt(found)}", row + 1)


def _excerpt(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:38] + "..")
