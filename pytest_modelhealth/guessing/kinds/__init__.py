"""The shelf of models whose inputs are guessed: one kind a file, found by itself.

None of the libraries is imported before a model of theirs is given.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from pytest_modelhealth.guessing.kinds.kind import Kind


@cache
def kinds() -> tuple[Kind, ...]:
    """Return one of each kind, in the order in which they are asked."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    found = {value for module in modules for value in vars(module).values() if _is_kind(value)}
    return tuple(sorted((kind() for kind in found), key=lambda kind: -kind.precedence))


def _is_kind(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Kind) and value is not Kind
