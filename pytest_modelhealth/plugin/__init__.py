"""The pytest plugin, in parts: each module in this folder and in `attachments` is one.

A part is a pytest plugin of its own and found by looking into the folder; ``-p
no:modelhealth.<name>`` switches a destination on the shelf `attachments` off. None imports torch,
numpy or matplotlib when it loads, as pytest loads them at every start.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

from pytest_modelhealth.plugin import attachments
from pytest_modelhealth.plugin.own_checks import Hooks

if TYPE_CHECKING:
    import pytest


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Register every part."""
    pluginmanager.add_hookspecs(attachments)
    pluginmanager.add_hookspecs(Hooks)
    for package, folder in ((__name__, __path__), (attachments.__name__, attachments.__path__)):
        for module in pkgutil.iter_modules(folder):
            if not module.ispkg:
                part = importlib.import_module(f"{package}.{module.name}")
                pluginmanager.register(part, f"modelhealth.{module.name}")
