"""What results look like: texts, pages and figures, made by modules that load when asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from pytest_modelhealth.errors import InspectionError, suggest

FORMATS = {
    "csv": ("data", "to_csv"),
    "evidence": ("evidence", "render"),
    "failure": ("failure", "render"),
    "html": ("summary", "html"),
    "json": ("data", "to_json"),
    "line": ("summary", "line"),
    "terminal": ("summary", "terminal"),
}
"""The module and the function that write a report, by the name of the format."""


def renderer(form: str, function: str) -> Callable[..., Any]:
    """Return a `function` of a module; each result is handed this to show itself by.

    Raises:
        InspectionError: ``"render"`` was asked for, and there is no such format; the message names
            the nearest.
    """
    if function == "render":
        if form not in FORMATS:
            known = f"{suggest(form, FORMATS)} Formats: {', '.join(FORMATS)}."
            raise InspectionError(f"unknown format {form!r}{known}")
        form, function = FORMATS[form]
    written: Callable[..., Any] = getattr(importlib.import_module(f"{__name__}.{form}"), function)
    return written
