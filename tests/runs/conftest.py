"""A browser for the tests of the page of a run and of its charts: one for the session."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
"""Installed by the system: no package of Python's brings a browser."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What draws in the browser is slow by its nature."""
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The Chromium of the system (``apt-get install chromium``), started once.

    Where playwright or the browser is missing the tests that need it are skipped, but fail in
    continuous integration (where ``CI`` is set), so that they are never silently left out there.
    While it is open its event loop counts as running: ``asyncio.run`` fails in the same process.
    """
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None or find_spec("playwright") is None:
        go_without = pytest.fail if os.environ.get("CI") else pytest.skip
        go_without("no browser: install playwright by pip, and Debian's chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()
