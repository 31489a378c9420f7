"""Reading the file of a run: what is wrong with one that cannot be read, in a sentence."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NoReturn

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.runs.run import FORMAT, FORMAT_VERSION, Run

_OBJECTS = {
    "run": "created:str environment:{str} exit_status:number tests:[test] notes:[str]",
    "test": "id:str file?:str outcome:str message:str results:[result]",
    "result": "kind:str verdict:str headline:str model:str text?:str place?:str",
    "inspection": "of:str loss:number? samples:number? batches?:number? violations:[finding] "
    "warnings:[finding] inconclusive:[doubt] waived:[waived] margins:[margin] totals:{number?} "
    "layers:[layer] flow?:flow? course?:course?",
    "comparison": "candidate:str divergence?:divergence? layers?:[compared]",
    "drift": "story:str drifts?:[drifted]",
    "finding": "check:str layer:str label:str message:str affected?:[str] consequences?:[effect]",
    "effect": "check:str layer:str",
    "doubt": "check:str layer:str label:str reason:str",
    "waived": "check:str layer:str label:str message:str reason:str",
    "margin": "check:str layer:str label:str value:number? limit:number? used:number? setting?:str",
    "layer": "name:str label:str type:str status:str dtype:str device:str calls:int parameters:int "
    "trainable:int activation_bytes:number? multiply_adds:number? saved_bytes:number? "
    "parameter_bytes:number? shape:[int]? tied:{str} tensors:[tensor]",
    "tensor": "role:str name:str dtype:str shape:[int] count:int nan:int inf:int zeros:int "
    "dead:number? mean:number? std:number? min:number? max:number? norm?:number? bins?:bins?",
    "bins": "lowest:int negative:[int] positive:[int]",
    "flow": "edges:[list] way:[str]",
    "course": "steps:[int] loss:[number?] layers:{{[number?]}}",
    "divergence": "layer:str label:str story:str candidate:str?",
    "compared": "reference:str? candidate:str? label:str diverged:bool tensors:[compared_tensor]",
    "compared_tensor": "role:str problem:str error:number? noise:number? ratio:number? "
    "limit:number? diverged:bool",
    "drifted": "layer:str label:str role:str statistic:str distance:number?",
}
"""What is read of a file; ``docs/reference/run-format.md`` has all that is in one.

A cell is a key, which may be missing where it ends in ``?``, and its shape: a type, an object here,
``[shape]`` for a list or ``{shape}`` for an object with any keys; ``?`` behind it admits null.
"""

_KEYS = {name: [cell.partition(":")[::2] for cell in row.split()] for name, row in _OBJECTS.items()}
_KINDS = ("inspection", "comparison", "drift")
"""Results that have keys of their own; what another kind has is not read."""

_TYPES: dict[str, tuple[Any, str]] = {
    "str": (str, "a string"),
    "int": (int, "an integer"),
    "number": ((int, float), "a number"),
    "bool": (bool, "true or false"),
    "list": (list, "a list"),
    "object": (dict, "an object"),
    "null": (type(None), "null"),
}


def problem(data: Any, shape: str, where: str = "") -> str | None:
    """Return what is wrong with `data` and where, or ``None``.

    Args:
        data: parsed JSON.
        shape: what it has to be, as the cells of `_OBJECTS` say.
        where: the path to it: ``"tests[3].results[0]"``.
    """
    if shape[-1] == "?":
        return None if data is None else problem(data, shape[:-1], where)
    outer = {"[": "list", "{": "object"}.get(shape[0], "object" if shape in _KEYS else shape)
    types, expected = _TYPES[outer]
    if not isinstance(data, types) or (isinstance(data, bool) and outer != "bool"):
        found = {**dict(_TYPES.values()), float: "a number"}[type(data)]
        return f"{where or 'the file'} is {found}, and has to be {expected}"
    inner = shape[1:-1]
    if shape[0] == "[":
        parts = [(item, inner, f"{where}[{index}]") for index, item in enumerate(data)]
    elif shape[0] == "{":
        parts = [(item, inner, f"{where}.{key}") for key, item in data.items()]
    else:
        parts = []
        keys = _KEYS.get(shape, [])
        if shape == "result" and data.get("kind") in _KINDS:
            keys = [*keys, *_KEYS[data["kind"]]]
        for key, inner in keys:
            name = key.removesuffix("?")
            path = f"{where}.{name}".lstrip(".")
            if name in data:
                parts.append((data[name], inner, path))
            elif name == key:
                return f"{path} is missing"
    return next(filter(None, (problem(*part) for part in parts)), None)


def read(path: str | os.PathLike[str]) -> Run:
    """Return the run that a file holds.

    Raises:
        InspectionError: it cannot be read, or holds no run that this version knows.
    """
    data = _parsed(Path(path))
    _require_format(data, path)
    wrong = problem(data, "run")
    if wrong is not None:
        raise InspectionError(f"{path}: {wrong}; write the file anew: {_WRITE}")
    return Run({key: value for key, value in data.items() if key != "tests"}, data["tests"])


_WRITE = "pytest --modelhealth-json=PATH"


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
