"""Settings from the ini file and the command line: default < ini < option."""

from __future__ import annotations

from typing import Any

import pytest

from pytest_modelhealth.checks import default_settings
from pytest_modelhealth.errors import SettingsError
from pytest_modelhealth.settings import Setting, Settings

_SETTINGS = pytest.StashKey[Settings]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare every setting as an ini option and as a command line option."""
    group = parser.getgroup("modelhealth", "model health")
    for setting in default_settings().declarations:
        text = f"{setting.help} (default: {setting.shown_default})"
        group.addoption(
            _option(setting),
            metavar=setting.type.__name__.upper(),
            default=None,
            help=text.replace("%", "%%"),  # argparse formats it
        )
        parser.addini(_ini(setting), text, type=_ini_type(setting), default=None)


def pytest_configure(config: pytest.Config) -> None:
    """Read the ini file and the command line once.

    Raises:
        pytest.UsageError: a value is not one of its setting.
    """
    settings = default_settings()
    try:
        for setting in settings.declarations:
            settings = _with_ini_value(settings, setting, config)
        for setting in settings.declarations:
            settings = _with_option_value(settings, setting, config)
    except SettingsError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[_SETTINGS] = settings


def session_settings(config: pytest.Config) -> Settings:
    """Return the settings that hold for every test without markers of its own."""
    return config.stash[_SETTINGS]


def _option(setting: Setting) -> str:
    return f"--modelhealth-{setting.name.replace('_', '-')}"


def _ini(setting: Setting) -> str:
    return f"modelhealth_{setting.name}"


def _ini_type(setting: Setting) -> Any:
    # Text first, so that `parse` reads what ini files hold; from 9.2 on, [tool.pytest] in TOML may
    # hold the number itself.
    if pytest.version_tuple < (9, 2) or setting.type is str:
        return "string"
    return str | setting.type


def _with_ini_value(settings: Settings, setting: Setting, config: pytest.Config) -> Settings:
    origin = _ini_origin(setting, config)
    try:
        value = config.getini(_ini(setting))
    except (TypeError, ValueError) as error:  # before 9.2, a number in [tool.pytest]
        raise SettingsError(f"{origin}: write the value in quotes; {error}") from None
    if isinstance(value, str):
        value = setting.parse(value, origin)
    elif value is None:
        return settings
    return settings.override({setting.name: value}, origin)


def _ini_origin(setting: Setting, config: pytest.Config) -> str:
    overridden = [text.partition("=")[0] for text in config.getoption("override_ini") or ()]
    if config.inipath is None or _ini(setting) in overridden:
        return f"--override-ini {_ini(setting)}"
    return f"{config.inipath.name}: {_ini(setting)}"


def _with_option_value(settings: Settings, setting: Setting, config: pytest.Config) -> Settings:
    option = _option(setting)
    text = config.getoption(option)
    if text is None:
        return settings
    return settings.override({setting.name: setting.parse(text, option)}, option)
