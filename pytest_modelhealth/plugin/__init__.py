"""The pytest plugin, in parts: each module in this folder and in `attachments` is one.

A part is a pytest plugin of its own and found by looking into the folder; ``-p
no:modelhealth.<name>`` switches a destination on the shelf `attachments` off. None imports torch,
numpy or matplotlib when it loads, as pytest loads them at every start.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

_FOLDER = Path(__file__).parent


def pytest_addhooks(pluginmanager: pytest.PytestPluginManager) -> None:
    """Register every part."""
    # pytest rewrites the asserts of whatever comes with a plugin, keeps the result apart and reads
    # that ten times slower than Python its own bytecode; where none may be written, as in many
    # containers, it does so at every start. No public name switches it off.
    rewritten: set[str] = getattr(pluginmanager.rewrite_hook, "_must_rewrite", set())
    rewritten.discard("pytest_modelhealth")
    from pytest_modelhealth.plugin import attachments

    pluginmanager.add_hookspecs(attachments)
    for package, folder in ((__name__, _FOLDER), (attachments.__name__, _FOLDER / "attachments")):
        for name in sorted(path.stem for path in folder.glob("[!_]*.py")):
            part = importlib.import_module(f"{package}.{name}")
            # a file of the run is an object; any other part is its module
            for own, plugin in getattr(part, "PLUGINS", {name: part}).items():
                pluginmanager.register(plugin, f"modelhealth.{own}")
