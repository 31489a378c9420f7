"""Finds what a user names as ``package.module:name``, and spells how it is called."""

from __future__ import annotations

import inspect
import operator
import pkgutil
import sys
import traceback
from pathlib import Path
from typing import Any

from pytest_modelhealth.errors import SettingsError, suggest


def named(spelled: str, folder: Path) -> Any:
    """Return what a user names; modules of `folder` are found, too.

    Raises:
        SettingsError: it cannot be imported; the message has the nearest name, or the traceback.
    """
    module_name, _, attribute = spelled.partition(":")
    if not all(map(str.isidentifier, (*module_name.split("."), *attribute.split(".")))):
        raise SettingsError(
            f"name a module and what in it makes the model, such as package.module:Model, not "
            f"{spelled!r}"
        )
    if str(folder) not in sys.path:  # as `python -m pytest` has it
        sys.path.insert(0, str(folder))
    module = _imported(module_name, folder)
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError:
        known = [name for name in dir(module) if not name.startswith("_")]
        raise SettingsError(
            f"{module_name} has no {attribute!r}{suggest(attribute, known)}"
        ) from None


def _imported(name: str, folder: Path) -> Any:
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise SettingsError(_raised(name)) from None
        package, _, last = error.name.rpartition(".")
        paths = getattr(sys.modules[package], "__path__", []) if package else [str(folder)]
        near = suggest(last, [module.name for module in pkgutil.iter_modules(paths)])
        raise SettingsError(
            f"there is no module {error.name!r} in {folder} or on sys.path{near} Name it as "
            "import does, in the folder that your tests run in"
        ) from None
    except Exception:  # noqa: BLE001 - the user's module
        raise SettingsError(_raised(name)) from None
    return sys.modules[name]


def _raised(name: str) -> str:
    frames = traceback.format_exc().rstrip().splitlines()
    own = next((n for n, line in enumerate(frames) if "<frozen importlib" in line), 0)
    shown = [line for line in frames[own:] if "<frozen importlib" not in line]
    return "\n".join([f"importing {name} raises", *shown])


def parameters_of(thing: Any) -> list[inspect.Parameter]:
    """Return what a class or function is called with; none where Python cannot tell."""
    try:
        return list(inspect.signature(thing).parameters.values())
    except (TypeError, ValueError):  # of a class written in C
        return []


def required(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    """Return the parameters that must be given."""
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p for p in parameters if p.default is p.empty and p.kind not in several]


def arguments_of(thing: Any) -> list[str]:
    """Return the arguments that a call needs, with ``...`` for each value: ``width=...``."""
    needed = required(parameters_of(thing))
    return ["..." if p.kind is p.POSITIONAL_ONLY else f"{p.name}=..." for p in needed]
