"""Finds what a user names as ``package.module:name``."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from pathlib import Path
from typing import Any

from pytest_modelhealth.errors import InspectionError, suggest


def named(spelled: str, what: str) -> Any:
    """Return what a user names; modules of the current directory are found, too.

    Raises:
        InspectionError: there is none; the message has the nearest name.
    """
    module_name, _, name = spelled.partition(":")
    parts = [*module_name.split("."), *name.split(".")]
    if not all(part.isidentifier() for part in parts):
        raise InspectionError(
            f"{what} takes MODULE:NAME, such as package.models:Encoder, not {spelled!r}"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    value: Any = _module(module_name, what)
    for part in name.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            held = [one for one in dir(value) if not one.startswith("_")]
            raise InspectionError(
                f"{what} {spelled}: {module_name} has no {part!r}{suggest(part, held)}"
            ) from None
    return value


def _module(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise InspectionError(
                f"{what}: importing {name} needs {error.name!r}, which is not installed"
            ) from None
        near = suggest(name.rpartition(".")[2], _neighbours(name))
        raise InspectionError(
            f"{what}: there is no module {name!r}, in {os.fspath(Path.cwd())} or installed{near} "
            "Run it in the folder that your tests run in."
        ) from None
    except Exception as error:
        raise InspectionError(
            f"{what}: importing {name} raised {type(error).__name__}: {error}"
        ) from error


def _neighbours(name: str) -> list[str]:
    """Return the modules beside the one that was meant."""
    package = name.rpartition(".")[0]
    if not package:
        return [module.name for module in pkgutil.iter_modules([str(Path.cwd())])]
    try:
        paths = importlib.import_module(package).__path__
    except (ImportError, AttributeError):
        return []
    return [module.name for module in pkgutil.iter_modules(paths)]
