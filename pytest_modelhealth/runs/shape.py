"""Whether parsed JSON has the shape that is read of it, told by the first place that has not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
