"""Shows how far a long call in a test is, on the row below the dots.

The descriptor of the terminal is kept from before the first test, so that a line can be drawn while
output is captured.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest


def pytest_sessionstart(session: pytest.Session) -> None:
    """Show tasks on the terminal, unless pytest runs in another process or was told to be quiet."""
    config = session.config
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    # A reporter of another plugin may keep the screen to itself. A worker of xdist has none.
    if type(reporter).__module__ != "_pytest.terminal" or config.get_verbosity() < -1:
        return
    if not reporter.isatty or _logs_live(config):
        return
    from pytest_modelhealth import progress

    if progress.draws_lines(sys.stdout):
        _show(config, progress)


def _logs_live(config: pytest.Config) -> bool:
    try:
        level = config.getoption("log_cli_level", None)
        return level is not None or bool(config.getini("log_cli"))
    except ValueError:  # -p no:logging
        return False


def _show(config: pytest.Config, progress: Any) -> None:
    terminal = os.dup(sys.stdout.fileno())  # what is written there, no capture takes

    def forget() -> None:
        progress.show_on(None)
        os.close(terminal)

    line = progress.Line(lambda text: os.write(terminal, text.encode("ascii")))
    progress.show_on(line)
    config.add_cleanup(forget)
