"""Turns on pytester, which pytest allows only in the conftest at the root of the run."""

pytest_plugins = ["pytester"]
