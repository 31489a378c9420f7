"""``--modelhealth-explain``: what is checked, and each check's limits in force."""

from __future__ import annotations

import sys

import pytest
from _pytest.config import create_terminal_writer

from pytest_modelhealth.errors import SettingsError
from pytest_modelhealth.plugin.options import session_settings

_OPTION = "--modelhealth-explain"


def pytest_cmdline_main(config: pytest.Config) -> int | pytest.ExitCode | None:
    """Print the checks in place of running tests.

    Raises:
        pytest.UsageError: no check has this name.
    """
    checks = config.getoption(_OPTION)
    if checks is None:
        return None
    from pytest_modelhealth.rendering.checks import explain, overview

    config._do_configure()
    try:
        settings = session_settings(config)
        lines = explain(settings, checks) if checks else overview(settings)
    except SettingsError as error:
        raise pytest.UsageError(str(error)) from None
    finally:
        config._ensure_unconfigure()
    writer = create_terminal_writer(config, sys.stdout)
    for line in lines:
        writer.line(line, bold=bool(line) and not line.startswith(" "))
    return pytest.ExitCode.OK
