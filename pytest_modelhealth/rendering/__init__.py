"""The shelf of formats: one a file, found by itself, and loaded when it is asked for."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from pytest_modelhealth.errors import InspectionError, suggest


def renderer(form: str, function: str) -> Callable[..., Any]:
    """Return the `function` of the file `form`; each result is handed this to show itself by.

    Raises:
        InspectionError: there is no such format; the message names the nearest.
    """
    files = [module.name for module in pkgutil.iter_modules(__path__)]
    if form in files and hasattr(_load(form), function):
        found: Callable[..., Any] = getattr(_load(form), function)
        return found
    formats = [name for name in files if hasattr(_load(name), "render")]
    raise InspectionError(
        f"unknown format {form!r}{suggest(form, formats)} Formats: {', '.join(formats)}."
    )


def _load(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")
