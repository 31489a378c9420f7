"""Wings: what the core works without. It reaches them by name, and where one is asked for.

A wing is a folder: without it the rest works, and says what is missing where it is asked for.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

from pytest_modelhealth.errors import InspectionError

_PACKAGE = __name__.rpartition(".")[0]


class MissingWingError(InspectionError, ImportError):
    """What was asked for is in a folder that this installation lacks."""


def wing(name: str) -> Any:
    """Return what a wing has, ``"removal.search:search"``, or a module of it, ``"runs.page"``.

    Rows of catalogues name what judges in the same way, in a wing or not.

    Raises:
        InspectionError: this installation lacks the wing; the message names it.
    """
    try:
        return resolve_name(f"{_PACKAGE}.{name}" if ":" in name else f"{_PACKAGE}.{name}:")
    except ModuleNotFoundError as error:
        if not str(error.name).startswith(f"{_PACKAGE}."):
            raise
        raise MissingWingError(
            f"this needs {error.name}, which this installation of pytest-modelhealth lacks: "
            "install the whole package again"
        ) from None


def has_wing(name: str) -> bool:
    """Whether a wing, such as ``"runs"``, or what it has is there."""
    return not why_missing(name)


def why_missing(name: str) -> str:
    """Return what to say where a wing is asked for and missing; ``""`` where it is there."""
    try:
        wing(name)
    except MissingWingError as error:
        return str(error)
    return ""
