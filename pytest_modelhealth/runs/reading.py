"""Reading the file of a run: what is wrong with one that cannot be read, in a sentence."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.runs.run import FORMAT, FORMAT_VERSION, Run

# Whether parsed JSON has the shape that is read of it, told by the first place that has not

Shape = Any
"""A type, a tuple of types, a list of one shape that every item has, a `Nullable`, a `Named`, or a
dictionary of keys and their shapes, which have to be there unless `Optional`; others may be."""


@dataclass(frozen=True)
class Nullable:
    """What is ``null`` or of a shape."""

    inner: Shape


@dataclass(frozen=True)
class Named:
    """An object under whose keys, whichever they are, everything is of a shape."""

    inner: Shape


@dataclass(frozen=True)
class Optional:
    """What may be missing from an object, and else is of a shape."""

    inner: Shape


NUMBER = (int, float)
OPTIONAL_NUMBER = Nullable(NUMBER)
OPTIONAL_SIZES = Nullable([int])

_WORDS = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def problem(data: Any, shape: Shape, where: str = "") -> str | None:
    """Return what is wrong with `data` and where, or ``None``.

    Args:
        data: parsed JSON.
        shape: what it has to be.
        where: the path to it: ``"tests[3].results[0]"``.
    """
    if isinstance(shape, Nullable):
        return None if data is None else problem(data, shape.inner, where)
    if isinstance(shape, Named):
        shape = dict.fromkeys(data, shape.inner) if isinstance(data, dict) else {}
    if isinstance(shape, dict):
        return _problem_of_object(data, shape, where)
    if isinstance(shape, list):
        return _problem_of_list(data, shape[0], where)
    kinds = shape if isinstance(shape, tuple) else (shape,)
    if isinstance(data, kinds) and (not isinstance(data, bool) or bool in kinds):
        return None
    return _wrong(data, where, "a number" if kinds == NUMBER else _WORDS[kinds[0]])


def _problem_of_object(data: Any, shape: dict[str, Shape], where: str) -> str | None:
    if not isinstance(data, dict):
        return _wrong(data, where, "an object")
    for key, inner in shape.items():
        path = f"{where}.{key}" if where else key
        if isinstance(inner, Optional):
            if key not in data:
                continue
            inner = inner.inner
        if key not in data:
            return f"{path} is missing"
        found = problem(data[key], inner, path)
        if found is not None:
            return found
    return None


def _problem_of_list(data: Any, inner: Shape, where: str) -> str | None:
    if not isinstance(data, list):
        return _wrong(data, where, "a list")
    for index, item in enumerate(data):
        found = problem(item, inner, f"{where}[{index}]")
        if found is not None:
            return found
    return None


def _wrong(data: Any, where: str, expected: str) -> str:
    return f"{where or 'the file'} is {_WORDS[type(data)]}, and has to be {expected}"


# What is read


def _each(names: str, shape: Shape) -> dict[str, Shape]:
    return dict.fromkeys(names.split(), shape)


_TENSOR = {
    **_each("role name dtype", str),
    **_each("count nan inf zeros", int),
    **_each("dead mean std min max", OPTIONAL_NUMBER),
    "shape": [int],
    "norm": Optional(OPTIONAL_NUMBER),
    "bins": Optional(Nullable({"lowest": int, "negative": [int], "positive": [int]})),
}
_LAYER = {
    **_each("name label type status dtype device", str),
    **_each("calls parameters trainable", int),
    **_each("activation_bytes multiply_adds saved_bytes parameter_bytes", OPTIONAL_NUMBER),
    "shape": OPTIONAL_SIZES,
    "tied": Named(str),
    "tensors": [_TENSOR],
}
_FINDING = {
    **_each("check layer label message", str),
    "affected": Optional([str]),
    "consequences": Optional([_each("check layer", str)]),
}
_MARGIN = {
    "check": str,
    "layer": str,
    "label": str,
    "value": OPTIONAL_NUMBER,
    "limit": OPTIONAL_NUMBER,
    "used": OPTIONAL_NUMBER,
    "setting": Optional(str),
}
_FLOW = {"edges": [list], "way": [str]}
_COURSE = {"steps": [int], "loss": [OPTIONAL_NUMBER], "layers": Named(Named([OPTIONAL_NUMBER]))}
_COMPARED_TENSOR = {
    **_each("role problem", str),
    **_each("error noise ratio limit", OPTIONAL_NUMBER),
    "diverged": bool,
}
_COMPARED = {
    **_each("reference candidate", Nullable(str)),
    "label": str,
    "diverged": bool,
    "tensors": [_COMPARED_TENSOR],
}
_DIVERGENCE = {**_each("layer label story", str), "candidate": Nullable(str)}
_DRIFT = {**_each("layer label role statistic", str), "distance": OPTIONAL_NUMBER}
_COMMON = {**_each("kind verdict headline model", str), **_each("text place", Optional(str))}
_KINDS: dict[str, dict[str, Any]] = {
    "inspection": {
        "of": str,
        **_each("loss samples", OPTIONAL_NUMBER),
        "batches": Optional(OPTIONAL_NUMBER),
        **_each("violations warnings", [_FINDING]),
        "inconclusive": [_each("check layer label reason", str)],
        "waived": [{**_FINDING, "reason": str}],
        "margins": [_MARGIN],
        "totals": Named(OPTIONAL_NUMBER),
        "layers": [_LAYER],
        "flow": Optional(Nullable(_FLOW)),
        "course": Optional(Nullable(_COURSE)),
    },
    "comparison": {
        "candidate": str,
        "divergence": Optional(Nullable(_DIVERGENCE)),
        "layers": Optional([_COMPARED]),
    },
    "drift": {"story": str, "drifts": Optional([_DRIFT])},
}
_TEST = {"id": str, "file": Optional(str), "outcome": str, "message": str, "results": [_COMMON]}
_RUN = {
    "created": str,
    "environment": Named(str),
    "exit_status": NUMBER,
    "tests": [_TEST],
    "notes": [str],
}
"""What is read of a file; ``docs/reference/run-format.md`` has all that is in one."""


def read(path: str | os.PathLike[str]) -> Run:
    """Return the run that a file holds.

    Raises:
        InspectionError: it cannot be read, or holds no run that this version knows.
    """
    data = _parsed(Path(path))
    _require_format(data, path)
    wrong = problem(data, _RUN)
    if wrong is None:
        wrong = next(filter(None, map(_problem_of, enumerate(data["tests"]))), None)
    if wrong is not None:
        raise InspectionError(f"{path}: {wrong}; write the file anew: {_WRITE}")
    return Run({key: value for key, value in data.items() if key != "tests"}, data["tests"])


_WRITE = "pytest --modelhealth-json=PATH"


def _problem_of(numbered: tuple[int, Any]) -> str | None:
    place, test = numbered
    for index, result in enumerate(test["results"]):
        wrong = problem(result, _KINDS.get(result["kind"], {}), f"tests[{place}].results[{index}]")
        if wrong is not None:
            return wrong
    return None


def _parsed(path: Path) -> Any:
    try:
        content = path.read_bytes()
    except OSError as error:
        found = error.strerror or str(error)
        raise InspectionError(f"{path}: {found}; a run is written by {_WRITE}") from None
    if not content.strip():
        raise InspectionError(f"{path}: the file is empty; write it anew: {_WRITE}")
    try:
        return json.loads(content, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise InspectionError(f"{path}: {_not_json(error, content)}") from None
    except (ValueError, RecursionError) as error:
        # not in UTF-8, a NaN, a number of thousands of digits, or brackets without end
        raise InspectionError(f"{path}: not JSON of a run: {error}; {_WRITE} writes one") from None


def _not_json(error: json.JSONDecodeError, content: bytes) -> str:
    where = f"line {error.lineno:,}, column {error.colno:,}"
    if content.lstrip()[:1] == b"{" and not content.rstrip().endswith(b"}"):
        return (
            f"the file is truncated: it ends after {len(content):,} bytes, within what begins at "
            f"{where}; was the run that wrote it, or a copy, broken off?"
        )
    return f"not JSON: {error.msg} at {where}; a run is written by {_WRITE}"


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _require_format(data: Any, path: object) -> None:
    found = data.get("format") if isinstance(data, dict) else None
    if found != FORMAT:
        if isinstance(data, dict) and {"verdict", "layers"} <= data.keys():
            what = "this is a report's JSON, not a run's"
        else:
            what = f"not the file of a run, whose 'format' is {FORMAT!r}"
        raise InspectionError(f"{path}: {what}; {_WRITE} writes one")
    version = data.get("format_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise InspectionError(f"{path}: format_version: {version!r} is no version; {_WRITE}")
    if version > FORMAT_VERSION:
        raise InspectionError(
            f"{path}: written in version {version} of the format; this pytest-modelhealth reads up "
            f"to version {FORMAT_VERSION}: upgrade it, or write both files with this one"
        )
