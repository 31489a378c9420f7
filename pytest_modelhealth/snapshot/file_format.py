"""The snapshot file in plain text: a line a layer; and what is written over another's.

::

    modelhealth snapshot, format 5
    test: test_model.py::test_no_drift
    profile: cpu float32
    model: Classifier
    recorded: pytest-modelhealth 0.1.0, torch 2.13.0
    noise: measured, epsilon 2^-23
    loss: 2.302585 ~4
    warning: wiring head never called
    # in, out, grad, .weight, ...: shape,mean,std,min,max; ~mean:4 4 times the usual noise

    layer=fc1 type=Linear out=64x10,0.0123456,0.5772157,-1.732051,1.618034,~min:4 .bias=10,0,0,0,0
    layer=fc2 type=Linear ...

    end

Layers stand in the order in which they returned, so those inside a layer come before it. A line is
cells of ``key=value`` between blanks; what has a blank in it is quoted as in a URL (``%20``). What
is usual is not written (noise, dtype, calls, zeros); what differs is a ``key:value``. The last line
tells a whole file from a truncated one. What the run warned of stands by check, layer and kind, so
that it is accepted once; older files have no such line. Reading executes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote, unquote

from pytest_modelhealth import __version__
from pytest_modelhealth.errors import ModelHealthError
from pytest_modelhealth.report import ROLES, UNCALLED, LayerRecord, Observation, Status
from pytest_modelhealth.snapshot.drift import detect_drift
from pytest_modelhealth.snapshot.snapshot import REAL, Snapshot, judges_zeros, of_roles, shape_text
from pytest_modelhealth.statistics import TensorStatistics
from pytest_modelhealth.statistics.tensor_statistics import ExponentCounts
from pytest_modelhealth.tolerance import LOSS, TensorName

VERSION = 5

_TITLE = "modelhealth snapshot, format "
_HEADER = ("test", "profile", "model", "recorded", "noise", "loss")
_LEGEND = "# in, out, grad, .weight, ...: shape,mean,std,min,max; ~mean:4 4 times the usual noise"
_EXAMPLE = "layer=fc type=Linear out=64x10,0.1,0.9,-2,2"
_END = "end"
_WARNING, _MODEL = "warning: ", "."  # no layer has a dot for a name
_UNQUOTED = "/:;,()[]<>{}@!$&*+?|'#^~"
_TIED = "tied."
_COUNTS = {"zeros": "zero_count", "count": "count", "nan": "nan_count", "inf": "inf_count"}

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
    """A text is no snapshot that this version can read, be it of the future: where, and why."""

    def __init__(self, message: str, line: int, *, is_future: bool = False) -> None:
        super().__init__(f"line {line}: {message}")
        self.message, self.line, self.is_future = message, line, is_future


def dump(snapshot: Snapshot) -> str:
    """Return the text of a snapshot file."""
    exponent = f"2^{math.log2(snapshot.epsilon):.0f}" if snapshot.epsilon else "0"
    digits = 9 if snapshot.epsilon > 1e-9 else 17
    loss, times = snapshot.observation.loss, snapshot.noise.get(LOSS, {}).get("value")
    header = (
        snapshot.test,
        snapshot.profile,
        snapshot.observation.model_type,
        snapshot.recorded,
        f"{'' if snapshot.calibrated else 'not '}measured, epsilon {exponent}",
        ("none" if loss is None else f"{loss:.{digits}g}") + (f" ~{times:.12g}" if times else ""),
    )
    lines = [
        f"{key}: {value if value.isprintable() else repr(value)}"
        for key, value in zip(_HEADER, header, strict=True)
    ]
    warned = [
        f"{_WARNING}{check} {quote(layer, safe=_UNQUOTED) or _MODEL} {kind}"
        for check, layer, kind in snapshot.warnings or ()
    ]
    lines += warned or [f"{_WARNING}none"] * (snapshot.warnings is not None)
    layers = (_line(snapshot, record, digits) for record in snapshot.layers.values())
    return "\n".join([f"{_TITLE}{VERSION}", *lines, _LEGEND, "", *layers, "", _END, ""])


def _line(snapshot: Snapshot, record: LayerRecord, digits: int) -> str:
    cells = {"layer": record.name, "type": record.type_name}
    if record.activation:
        cells["fn"] = record.activation
    if record.status != Status.OBSERVED:
        cells["status"] = record.status
    if record.calls != (record.status not in UNCALLED):
        cells["calls"] = str(record.calls)
    for name, tensor in snapshot.tensors[record.name].items():
        parts = [shape_text(tensor.shape)]
        parts += [f"{getattr(tensor, one) + 0.0:.{digits}g}" for one in REAL]
        usual = _usual(snapshot.profile, tensor.shape)
        seen = {key: getattr(tensor, field) for key, field in _COUNTS.items()}
        seen |= {"dtype": tensor.dtype, "zeros": seen["zeros"] * judges_zeros(name)}
        parts += [f"{key}:{value}" for key, value in seen.items() if value != usual[key]]
        noise = snapshot.noise.get(name, {})
        parts += [f"~{key}:{times:.12g}" for key, times in noise.items()]
        cells[_ROLES[name[1]].format(name[2])] = ",".join(parts)
    cells |= {f"{_TIED}{own}": full for own, full in record.tied.items()}
    quoted = ([quote(text, safe=_UNQUOTED) for text in cell] for cell in cells.items())
    return " ".join(map("=".join, quoted))


def _usual(profile: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return what a tensor is unless its cell says otherwise."""
    dtype = profile.rpartition(" ")[2]
    return {"dtype": dtype, "count": math.prod(shape), "zeros": 0, "nan": 0, "inf": 0}


def load(text: str) -> Snapshot:
    """Return the snapshot that a text spells.

    Raises:
        SnapshotFormatError: it spells none, is incomplete, or has another format version.
    """
    lines = text.rstrip("\n").split("\n")
    _check_version(lines[0])
    _check_letters(lines)
    header: dict[str, str] = {}
    for row, key in enumerate(_HEADER, start=1):
        line = lines[row] if row < len(lines) else ""
        if not line.startswith(f"{key}: "):
            raise _expected(f"'{key}: ...'", line, row)
        header[key] = line.removeprefix(f"{key}: ")
    if lines[-1] != _END:
        message = f"the file is truncated: {_END!r} should be its last line"
        raise SnapshotFormatError(message, len(lines))
    noises: dict[TensorName, dict[str, float]] = {}
    measured, epsilon, loss = _numbers(header, noises)
    layers: dict[str, LayerRecord] = {}
    for row, line in enumerate(lines[:-1]):
        if row <= len(_HEADER) or not line or line.startswith(("#", _WARNING)):
            continue
        try:
            record = _layer(line, header["profile"], noises, place=row)
        except (ValueError, KeyError):
            raise _expected(f"a layer, {_EXAMPLE!r},", line, row) from None
        if record.name in layers:
            raise _expected("another layer", record.name, row)
        layers[record.name] = record
    return Snapshot(
        header["test"],
        header["profile"],
        header["recorded"],
        measured,
        epsilon,
        Observation(layers, header["model"], loss=loss),
        noises,
        _warnings(lines),
    )


def _warnings(lines: Iterable[str]) -> dict[tuple[str, str, str], str] | None:
    cells = [one.removeprefix(_WARNING).split(" ", 2) for one in lines if one.startswith(_WARNING)]
    if not cells:
        return None
    warned = (one for one in cells if len(one) == 3)  # ``none`` is none
    return {(c, "" if layer == _MODEL else unquote(layer), k): k for c, layer, k in warned}


def _check_version(line: str) -> None:
    version = line.removeprefix(_TITLE)
    if version == line:
        raise _expected(f"'{_TITLE}{VERSION}'", version, 0)
    if version in map(str, range(VERSION)):
        message = f"written by an older format ({version}); run with --snapshot-update"
        raise SnapshotFormatError(message, 1)
    if version != str(VERSION):
        message = (
            f"format {version[:40]!r} is that of a later version of the plugin; "
            f"pytest-modelhealth {__version__} reads format {VERSION}"
        )
        raise SnapshotFormatError(message, 1, is_future=True)


def _numbers(
    header: Mapping[str, str], noises: dict[TensorName, dict[str, float]]
) -> tuple[bool, float, float | None]:
    """Return whether noise was measured, the epsilon, and the loss, whose noise it takes down."""
    try:
        unmeasured, _, exponent = header["noise"].partition("measured, epsilon ")
        epsilon = 0.0 if exponent == "0" else math.ldexp(1.0, int(exponent.removeprefix("2^")))
        value, _, times = header["loss"].partition(" ~")
        loss = None if value == "none" else float(value)
        if times:
            noises[LOSS] = {"value": _noise(times)}
        if epsilon > 1:
            raise ValueError(exponent)
    except (ValueError, OverflowError):
        found = f"{header['noise']}; {header['loss']}"
        raise _expected("'noise: measured, epsilon 2^-23' and 'loss: 0.25'", found, 5) from None
    return not unmeasured, epsilon, loss


def _check_letters(lines: Iterable[str]) -> None:
    for row, line in enumerate(lines):
        if not line.isprintable():  # it could steer a terminal; where it is meant, it is quoted
            raise _expected("printable text", line, row)


def _layer(
    line: str, profile: str, noises: dict[TensorName, dict[str, float]], place: int
) -> LayerRecord:
    """Return what a line says of a layer; some error where it says nothing."""
    parts = (cell.partition("=") for cell in line.split())
    cells = {unquote(key): unquote(value) for key, _, value in parts}
    name, type_name = cells.pop("layer"), cells.pop("type")
    status = cells.pop("status", Status.OBSERVED.value)
    calls, activation = cells.pop("calls", str(int(status not in UNCALLED))), cells.pop("fn", None)
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
            noise[key[1:]] = _noise(value)
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


def _noise(text: str) -> float:
    if not 0 <= (times := float(text)) < math.inf:
        raise ValueError(text)
    return times


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(text)
    return int(text)


def _expected(what: str, found: str, row: int) -> SnapshotFormatError:
    excerpt = repr(found if len(found) <= 40 else found[:38] + "..")
    return SnapshotFormatError(f"{what} should be here, not {excerpt}", row + 1)


def merge(old_text: str, now: Snapshot, path: str = "") -> str:
    """Return the text to write over that of a file.

    Lines within their tolerance are kept, so that a diff shows what drifted and nothing else. The
    path is for messages.

    Raises:
        ModelHealthError: something would be lost that another test, another device or a later
            version of the plugin recorded.
    """
    try:
        before = load(old_text)
    except SnapshotFormatError as error:
        if not error.is_future:
            return dump(now)
        raise ModelHealthError(
            f"the snapshot cannot be read: {path}:{error.line}: {error.message}\nRecording would "
            "overwrite it: restore the file from version control, or delete it and record anew "
            "with pytest --snapshot-update."
        ) from None
    if stranger := of_another(before, now):
        raise ModelHealthError(stranger)
    if before.epsilon != now.epsilon or (now.calibrated and not before.calibrated):
        return dump(now)
    kept = detect_drift(before, now).kept
    seen = {name: one for layer in before.layers for name, one in before.tensors[layer].items()}
    found = now.with_tensors(lambda name, one: seen[kept[name]] if name in kept else one)
    noise = {name: one for name, one in now.noise.items() if name not in kept}
    noise |= {name: before.noise[old] for name, old in kept.items() if old in before.noise}
    loss = (before if LOSS in kept else now).observation.loss
    observation = replace(found.observation, loss=loss)
    return dump(replace(found, noise=noise, observation=observation))


def of_another(before: Snapshot, now: Snapshot) -> str:
    """Return why a file is not one of this test, device and dtype; ``""`` where it is."""
    if before.test != now.test:
        return (
            f"the snapshot is of another test: {before.test}, not {now.test}\n"
            'The name of a file has no / \\ ? * : | " < >, so two parameters can share one: give '
            "each an id of its own. If the file was moved or copied here, delete it and record "
            "anew with pytest --snapshot-update, which does not overwrite it."
        )
    if before.profile != now.profile:
        return (
            f"the snapshot is of {before.profile}, the report of {now.profile}\n"
            f'Give each a name, health_snapshot(name="{now.profile}"), or delete the file and '
            "record anew with pytest --snapshot-update, which does not overwrite it."
        )
    return ""
