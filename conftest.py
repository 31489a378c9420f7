"""Turns on pytester, which pytest allows only in the conftest at the root of the run."""

import pytest

pytest_plugins = ["pytester"]


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Let the examples run without pytest-timeout, whose options would be unknown."""
    if not any(map(pluginmanager.hasplugin, ("timeout", "pytest_timeout"))):
        for name in ("timeout", "timeout_method"):
            parser.addini(name, "of pytest-timeout, which is not installed")
