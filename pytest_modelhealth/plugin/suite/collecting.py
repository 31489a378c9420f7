"""Suites without a file: ``--modelhealth-model=package.module:make``."""

from __future__ import annotations

import operator
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from pytest_modelhealth.errors import SettingsError, suggest
from pytest_modelhealth.plugin.options import session_settings
from pytest_modelhealth.plugin.suite.attributes import place_of, require_sound
from pytest_modelhealth.plugin.suite.suite import ModelHealthSuite, modelhealth_suite

OPTION = "--modelhealth-model"
_WRITE = "write a function that returns (model, inputs, target, loss), and name that"


class SuiteWithoutFile(pytest.Module):
    """The tests of a suite that the command line names; its id is ``package.module:make``."""

    def _getobj(self) -> ModuleType:
        made = ModuleType(self.name)
        made.__doc__ = None
        return made

    def collect(self) -> Iterator[pytest.Class]:
        """Yield the class of the suite.

        Raises:
            pytest.Collector.CollectError: there is no such module or name, or it is no factory.
        """
        short = self.name.rpartition(":")[2]
        try:
            suite = suite_named(self.name, self.config.invocation_params.dir)
            require_sound(suite, short, session_settings(self.config))
        except SettingsError as error:
            raise self.CollectError(f"{OPTION}={self.name}: {error}") from None
        self.path = place_of(suite)[0]
        setattr(self.obj, short, suite)  # where pytest looks for the class
        yield pytest.Class.from_parent(self, name=short, nodeid=self.nodeid)


def suite_named(name: str, folder: Path) -> type[ModelHealthSuite]:
    """Return the suite of a factory by its name, ``package.module:make``.

    Raises:
        SettingsError: it cannot be imported, or is no factory; the message says what to write.
    """
    module_name, _, attribute = name.partition(":")
    if str(folder) not in sys.path:  # as `python -m pytest` has it
        sys.path.insert(0, str(folder))
    module = _imported(module_name)
    try:
        found = operator.attrgetter(attribute)(module)
    except AttributeError:
        known = [n for n in vars(module) if not n.startswith("_")]
        raise SettingsError(
            f"{module_name} has no {attribute!r}{suggest(attribute, known)}"
        ) from None
    if isinstance(found, type) and issubclass(found, ModelHealthSuite):
        return found
    if isinstance(found, nn.Module):
        raise SettingsError(
            f"{attribute} is a model itself, of class {type(found).__name__}, and a suite needs "
            f"what makes one anew: {_WRITE}"
        )
    if not callable(found):
        raise SettingsError(f"{attribute} is a {type(found).__name__} and makes no model: {_WRITE}")
    return modelhealth_suite(found)


def _imported(name: str) -> Any:
    """Return a module by its name.

    Raises:
        SettingsError: there is none, or importing it raises.
    """
    try:
        __import__(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise SettingsError(
                f"there is no module {error.name!r} in {Path.cwd()} or on sys.path; name it as "
                "import does, package.module:make"
            ) from None
        raise SettingsError(_raised(name)) from None
    except Exception:  # noqa: BLE001 - the user's module
        raise SettingsError(_raised(name)) from None
    return sys.modules[name]


def _raised(name: str) -> str:
    frames = traceback.format_exc().rstrip().splitlines()
    own = next((n for n, line in enumerate(frames) if "<frozen importlib" in line), 0)
    shown = [line for line in frames[own:] if "<frozen importlib" not in line]
    return "\n".join([f"importing {name} raises", *shown])
