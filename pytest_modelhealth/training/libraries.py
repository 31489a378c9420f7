"""Tells the objects of other libraries without importing any."""

from __future__ import annotations

from types import ModuleType


def is_of(value: object, *packages: str) -> bool:
    """Whether a package defines the type of an object, or one that it derives from.

    A module is told by its own name.
    """
    if isinstance(value, ModuleType):
        names = [value.__name__]
    else:
        names = [kind.__module__ for kind in type(value).__mro__]
    return any(name == pkg or name.startswith(f"{pkg}.") for name in names for pkg in packages)
