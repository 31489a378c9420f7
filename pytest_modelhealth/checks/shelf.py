"""Which checks there are: those of a folder, and a project's own."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator
from functools import cache
from inspect import isabstract
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from pytest_modelhealth.checks.check import Check
from pytest_modelhealth.errors import SettingsError
from pytest_modelhealth.settings import SEVERITIES, Setting, Settings

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_SCALARS = (float, int, bool, str)
_RESERVED = {"artifacts", "compiled", "explain", "model", "on_report", "own_checks", "waive"}
_RESERVED |= {"replay", "replay_from", "replay_limit", "replay_without"}
"""Names that an option or an argument of `Inspector` has, which is no setting."""


@cache
def all_checks() -> tuple[Check, ...]:
    """Return one of each check that a file of this folder defines, the gravest first."""
    return checks_in(__name__.rpartition(".")[0], Path(__file__).parent)


def checks_in(package: str, folder: Path) -> tuple[Check, ...]:
    """Return one of each check that a file of a folder defines, the gravest first.

    Args:
        package: the name that the folder is imported by.
        folder: where it lies.
    """
    names = [path.stem for path in folder.glob("[!_]*.py")]
    modules = [importlib.import_module(f"{package}.{name}") for name in names]
    return by_rank(check() for module in modules for check in _defined_in(module))


def _defined_in(module: ModuleType) -> Iterator[type[Check]]:
    for defined in vars(module).values():
        is_own = isinstance(defined, type) and defined.__module__ == module.__name__
        if is_own and issubclass(defined, Check) and not isabstract(defined):
            yield defined


def by_rank(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Return checks in order, the gravest first."""
    return tuple(sorted(checks, key=lambda check: (check.rank, check.name)))


def with_own_checks(settings: Settings, own: Iterable[type[Check]], origin: str) -> Settings:
    """Return `settings` for the checks it has and a project's `own`.

    Args:
        settings: the settings to add to; values and waivers stay.
        own: subclasses of `Check`. One that is there already is not added twice.
        origin: who gave them, for messages.

    Raises:
        SettingsError: one of them is no sound check: the message says which and why.
    """
    checks = cast("tuple[Check, ...]", settings.checks)
    if not isinstance(own, Iterable):
        raise SettingsError(f"{origin}: give a list of subclasses of Check, not {own!r}")
    if own == () and checks:  # as a rule: theirs are in order already
        return settings
    for kind in own:
        if not any(type(check) is kind for check in checks):
            reason = _why_unsound(kind, checks, settings)
            if reason:
                raise SettingsError(f"{origin}: {_where(kind)}: {reason}")
            checks = (*checks, kind())
    return settings.with_checks(by_rank(checks))


def _where(kind: object) -> str:
    if not isinstance(kind, type):
        return repr(kind)
    return f"{kind.__module__}.{kind.__qualname__}"


def _why_unsound(kind: Any, checks: tuple[Check, ...], settings: Settings) -> str | None:
    """Return what is wrong with a project's check, if anything is."""
    if not (isinstance(kind, type) and issubclass(kind, Check)):
        return "it is no subclass of pytest_modelhealth.Check; give the class itself"
    if isabstract(kind):
        return "it has no run(self, observation, settings)"
    try:
        kind()
    except Exception as error:  # noqa: BLE001 - whatever its __init__ raises
        return f"it cannot be made without arguments: {type(error).__name__}: {error}"
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return f"name must be words in lower case joined by underscores, not {name!r}"
    if any(check.name == name for check in checks):
        return f"there is a check {name!r} already; give it another name"
    rank: object = kind.rank
    if not isinstance(rank, int | float):
        return f"rank must be a number, not {rank!r}"
    if kind.severity not in SEVERITIES:
        return f"severity must be 'warn' or 'fail', not {kind.severity!r}"
    texts = ("summary", "definition", "source", "minimum_evidence", "role")
    for text in (text for text in texts if not isinstance(getattr(kind, text), str)):
        return f"{text} must be a string, not {getattr(kind, text)!r}"
    return _why_settings_unsound(kind, settings)


def _why_settings_unsound(kind: Any, settings: Settings) -> str | None:
    declared = kind.settings
    if not isinstance(declared, tuple) or not all(isinstance(s, Setting) for s in declared):
        return "settings must be a tuple of pytest_modelhealth.Setting"
    taken = {*settings, *_RESERVED}
    for setting in declared:
        if not isinstance(setting.name, str) or not _NAME.fullmatch(setting.name):
            return f"the name of a setting must be words in lower case, not {setting.name!r}"
        if setting.name in taken:
            return f"there is a setting {setting.name!r} already; give it another name"
        taken.add(setting.name)
        if setting.type not in _SCALARS:
            return f"the type of {setting.name} must be float, int, bool or str"
        try:
            setting.validate(setting.default, "its default")
        except SettingsError as error:
            return str(error)
    return None
