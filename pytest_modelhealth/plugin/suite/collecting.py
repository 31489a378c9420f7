"""Suites before their tests run: what their attributes say, and those without a file."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from pytest_modelhealth.errors import SettingsError, suggest
from pytest_modelhealth.plugin.options import session_settings
from pytest_modelhealth.plugin.suite.making import model_alone, named
from pytest_modelhealth.plugin.suite.suite import ATTRIBUTES, ModelHealthSuite, modelhealth_suite
from pytest_modelhealth.settings import Settings

Suite = type[ModelHealthSuite]


def require_sound(suite: Suite, name: str, settings: Settings) -> None:
    """Do nothing if all attributes of a suite can be used.

    Raises:
        SettingsError: one is missing, of a wrong type, or names no test or setting.
    """
    if not callable(getattr(suite, "make", None)):
        raise SettingsError(
            f"{name} has no make(), which makes the model to test: def make(self): return "
            "Encoder(), torch.randn(16, 8), labels, F.cross_entropy. A class that others inherit "
            "from says __test__ = False."
        )
    bases = (cls for cls in suite.__mro__ if cls not in ModelHealthSuite.__mro__)
    for own in (own for cls in bases for own in vars(cls)):
        nearest = difflib.get_close_matches(own, ATTRIBUTES, n=1, cutoff=0.8)
        if own not in ATTRIBUTES and nearest:  # misspelt, it would have no effect
            raise SettingsError(
                f"{name}.{own}: a suite has no such attribute; did you mean {nearest[0]!r}?"
            )
    if isinstance(suite.seed, bool) or not isinstance(suite.seed, int):
        raise SettingsError(f"{name}.seed must be a whole number, not {suite.seed!r}")
    for test, reason in _by_test(suite, name, "skip"):
        if not isinstance(reason, str) or not reason.strip():
            raise SettingsError(f"{name}.skip[{test!r}]: say the reason in words, not {reason!r}")
    for test, limits in _by_test(suite, name, "limits"):
        settings.override(limits, f"{name}.limits[{test!r}]")


def _by_test(suite: Suite, name: str, attribute: str) -> Iterator[tuple[str, Any]]:
    """Yield what an attribute says by the names of tests.

    Raises:
        SettingsError: it is no mapping, or a test is unknown.
    """
    tests = [one for one in dir(suite) if one.startswith("test") and callable(getattr(suite, one))]
    given = getattr(suite, attribute)
    if not isinstance(given, Mapping):
        raise SettingsError(
            f"{name}.{attribute} must be a dictionary by the names of tests, such as "
            f"{{'test_causal': ...}}, not {given!r}"
        )
    for test, value in given.items():
        if test not in tests:
            raise SettingsError(
                f"{name}.{attribute}: there is no test {test!r}{suggest(test, tests)} "
                f"Tests: {', '.join(tests)}."
            )
        yield test, value


def place_of(suite: Suite) -> tuple[Path, int]:
    """Return the file and the line (from 1) that make the model of a suite."""
    make: Any = inspect.unwrap(getattr(suite, "make", suite))
    for found in (make, type(make), suite):
        try:
            return Path(inspect.getfile(found)), inspect.getsourcelines(found)[1]
        except (OSError, TypeError):
            continue
    return Path(getattr(sys.modules.get(suite.__module__), "__file__", None) or "."), 1


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
    found, attribute = named(name, folder), name.partition(":")[2]
    if isinstance(found, type) and issubclass(found, ModelHealthSuite):
        return found
    if isinstance(found, nn.Module):
        raise SettingsError(
            f"{attribute} is a model itself, of class {type(found).__name__}, and a suite needs "
            f"what makes one anew: {_WRITE}"
        )
    if isinstance(found, type) and issubclass(found, nn.Module):
        raise SettingsError(model_alone(f"the class {attribute}", found))
    if not callable(found):
        raise SettingsError(f"{attribute} is a {type(found).__name__} and makes no model: {_WRITE}")
    return modelhealth_suite(found)
