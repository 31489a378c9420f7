"""Suites without a file: ``--modelhealth-model=package.module:make``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

from pytest_modelhealth.errors import SettingsError
from pytest_modelhealth.plugin.options import session_settings
from pytest_modelhealth.plugin.suite.attributes import place_of, require_sound
from pytest_modelhealth.plugin.suite.making import model_alone
from pytest_modelhealth.plugin.suite.naming import named
from pytest_modelhealth.plugin.suite.suite import ModelHealthSuite, modelhealth_suite
from pytest_modelhealth.plugin.suite.transformers_models import is_pretrained

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
    if isinstance(found, type) and issubclass(found, nn.Module) and not is_pretrained(found):
        raise SettingsError(model_alone(f"the class {attribute}", found))
    if not callable(found):
        raise SettingsError(f"{attribute} is a {type(found).__name__} and makes no model: {_WRITE}")
    return modelhealth_suite(found)
