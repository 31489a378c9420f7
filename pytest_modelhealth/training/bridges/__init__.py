"""The shelf of callbacks for trainers of other libraries: one a file, found by itself.

A file is called as its library is imported, and has ``callback(follower)``. The library is imported
when a callback is asked for, never before.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from pytest_modelhealth.errors import InspectionError, suggest
from pytest_modelhealth.training.bridges.following import Follower


def callback_of(monitor: Any, library: str) -> Any:
    """Return a callback for the trainer of a library.

    Args:
        monitor: what the callback starts, tells of each step, and closes.
        library: its name as it is imported, such as ``"lightning"``.

    Raises:
        InspectionError: there is none for it, or it is not installed.
    """
    files = [module.name for module in pkgutil.iter_modules(__path__)]
    libraries = [name for name in files if hasattr(_load(name), "callback")]
    if library not in libraries:
        raise InspectionError(
            f"unknown library {library!r}{suggest(library, libraries)} There are callbacks for "
            f"{', '.join(libraries)}; any other loop calls monitor.step_end(step, loss=loss)."
        )
    try:
        return _load(library).callback(Follower(monitor))
    except ImportError as error:
        raise InspectionError(
            f"callback({library!r}) needs {library}, which cannot be imported: {error}"
        ) from error


def _load(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")
