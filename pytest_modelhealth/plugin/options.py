"""Settings and waivers from the ini file and the command line: default < ini < option.

They are declared when something asks for them: an argument or an ini value of ours, a project's own
check, or ``--help``. A suite that does not use the plugin then loads no check at its start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelhealth.errors import SettingsError
from pytest_modelhealth.plugin.own_checks import implementors, settings_with_own_checks

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from pytest_modelhealth.settings import Setting, Settings

_DECLARED = pytest.StashKey["Settings"]()
_SETTINGS = pytest.StashKey["Settings"]()


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, Any, Any]:
    """Declare every setting as soon as each conftest.py that can give own checks is loaded."""
    result = yield
    if _is_asked_for(early_config, args):
        settings = settings_with_own_checks(early_config)
        _declare(parser, (*settings.declarations, _waive()))
        early_config.stash[_DECLARED] = settings
    return result


def _is_asked_for(config: pytest.Config, args: Iterable[str]) -> bool:
    # An xdist worker gets the controller's options as values, not as arguments.
    given = (name for name, value in vars(config.option).items() if value is not None)
    ini = config.inipath.read_bytes() if config.inipath else b""
    named = b"modelhealth_" in ini or any("modelhealth" in text for text in (*args, *given))
    return named or bool(implementors(config)) or bool(config.known_args_namespace.help)


def _waive() -> Setting:
    """Return what is an option and an ini value only: a marker and a call say it otherwise."""
    from pytest_modelhealth.settings import Setting

    return Setting(
        "waive",
        list,
        default=None,
        help="violations to accept in every test, as 'LAYERS [CHECK]: REASON'; LAYERS and CHECK "
        "are names or shell wildcards",
    )


def _declare(parser: pytest.Parser, settings: Iterable[Setting]) -> None:
    group = parser.getgroup("modelhealth", "model health")
    for setting in settings:
        option = _option(setting)
        text = f"{setting.help} (default: {setting.shown_default})"
        group.addoption(
            option,
            action="append" if setting.takes_lines else "store",
            metavar=_metavar(setting),
            default=None,
            help=text.replace("%", "%%"),  # argparse formats it
        )
        parser.addini(_ini(setting), f"default of {option}", type=_ini_type(setting), default=None)


def pytest_configure(config: pytest.Config) -> None:
    """Read the ini file and the command line once.

    Raises:
        pytest.UsageError: a value is not one of its setting.
    """
    settings = config.stash.get(_DECLARED, None)
    if settings is None:
        return
    declared = (*settings.declarations, _waive())
    try:
        for setting in declared:
            settings = _with_ini_value(settings, setting, config)
        for setting in declared:
            settings = _with_option_value(settings, setting, config)
    except SettingsError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[_SETTINGS] = settings


def session_settings(config: pytest.Config) -> Settings:
    """Return the settings that hold for every test without markers of its own."""
    if _SETTINGS not in config.stash:
        config.stash[_SETTINGS] = settings_with_own_checks(config)
    return config.stash[_SETTINGS]


def _option(setting: Setting) -> str:
    return f"--modelhealth-{setting.name.replace('_', '-')}"


def _ini(setting: Setting) -> str:
    return f"modelhealth_{setting.name}"


_METAVARS = {
    "layers": "LAYERS",
    "checks": "NAMES",
    "skip_checks": "NAMES",
    "severity": "[CHECK:]warn|fail",
    "probes": "all|none|NAMES",
    "thresholds": "LAYERS:NAME=VALUE",
    "waive": "LAYERS:REASON",
}


def _metavar(setting: Setting) -> str:
    return _METAVARS.get(setting.name, setting.type.__name__.upper())


def _ini_type(setting: Setting) -> Any:
    if setting.takes_lines:
        return "linelist"
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
        spelling = "as a list of strings" if setting.takes_lines else "in quotes"
        raise SettingsError(f"{origin}: write the value {spelling}; {error}") from None
    if value is None:
        return settings
    if isinstance(value, str | list):
        return _read(settings, setting, value, origin)
    return settings.override({setting.name: value}, origin)


def _ini_origin(setting: Setting, config: pytest.Config) -> str:
    overridden = [text.partition("=")[0] for text in config.getoption("override_ini") or ()]
    if config.inipath is None or _ini(setting) in overridden:
        return f"--override-ini {_ini(setting)}"
    return f"{config.inipath.name}: {_ini(setting)}"


def _with_option_value(settings: Settings, setting: Setting, config: pytest.Config) -> Settings:
    option = _option(setting)
    value = config.getoption(option)
    return settings if value is None else _read(settings, setting, value, option)


def _read(settings: Settings, setting: Setting, value: str | list[str], origin: str) -> Settings:
    text = "\n".join(value) if isinstance(value, list) else value
    if setting.name == "waive":
        from pytest_modelhealth.settings.waiver import parse_waivers

        return settings.waive(*parse_waivers(text, origin))
    return settings.read(setting.name, text, origin)
