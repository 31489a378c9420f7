"""The one writer of records as plain data: for JSON, the file of a run, bundles and workers.

It is read by its keys, as users' hooks read a run. Records go to other ranks as pickles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import singledispatch
from typing import Any


@singledispatch
def encode(value: Any) -> Any:
    """Return `value` in dictionaries and lists, with ``None`` for floats that are not finite.

    A record has a key for each field, but for those whose metadata says ``"json": False``. Another
    kind of object is registered with the function that makes plain data of it.
    """
    if isinstance(value, str | int | None):  # most are
        return value
    if is_dataclass(value):
        kept = (one.name for one in fields(value) if one.metadata.get("json", True))
        return {name: encode(getattr(value, name)) for name in kept}
    if hasattr(value, "_asdict"):  # a named tuple, as limits are
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return value


@encode.register
def _(value: float) -> float | None:
    return value if math.isfinite(value) else None


@encode.register
def _(value: Enum) -> Any:
    return value.value
