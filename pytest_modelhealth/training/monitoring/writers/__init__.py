"""The shelf of destinations for the numbers of a monitor: one a file, found by itself.

None of the libraries is imported here: what the user hands over is told by the name of the module
that defines its type.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from typing import Any

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.training.monitoring.writers.sink import Sink


@cache
def all_sinks() -> tuple[type[Sink], ...]:
    """Return the kinds of destination that the files of this folder define."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    found = {kind for module in modules for kind in vars(module).values() if _is_sink(kind)}
    return tuple(sorted(found, key=lambda kind: (kind.is_fallback, kind.__name__)))


def _is_sink(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Sink) and value is not Sink


def sinks_of(to: Any) -> list[Sink]:
    """Return what writes to a destination, or to several in a list or tuple.

    Raises:
        InspectionError: something is no destination, or it is not ready; the message says why.
    """
    if to is None:
        return []
    return [_sink(one) for one in (to if isinstance(to, list | tuple) else [to])]


def _sink(destination: Any) -> Sink:
    for kind in all_sinks():
        if kind.accepts(destination):
            return kind(destination)
    known = ", ".join(kind.meant for kind in all_sinks())
    raise InspectionError(
        f"to={destination!r} ({type(destination).__name__}) is nothing that numbers can be "
        f"written to. Give one of these, or a list of them: {known}."
    )
