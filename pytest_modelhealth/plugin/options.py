"""Settings and waivers from the ini file and the command line: default < ini < option.

The ini names are declared when something asks for them: an argument or an ini value of ours, or a
project's own check. A suite that does not use the plugin then loads no check at its start, and
``pytest --help``, which would print a line for each name, has none: ``--modelhealth-explain`` does.
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


_OPTION = "--modelhealth-set"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the one option for all settings."""
    parser.getgroup("modelhealth", "model health").addoption(
        _OPTION,
        action="append",
        metavar="NAME=VALUE",
        help="a setting, such as max_grad_norm=10 or checks=finite; repeatable; in an ini file "
        "modelhealth_NAME = VALUE; --modelhealth-explain lists them all",
    )


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, Any, Any]:
    """Declare every setting as soon as each conftest.py that can give own checks is loaded."""
    result = yield
    if _is_asked_for(early_config, args):
        settings = settings_with_own_checks(early_config)
        for name, setting in _declared(settings).items():
            text = f"as {_OPTION} {name}"
            parser.addini(_ini(setting), text, type=_ini_type(setting), default=None)
        early_config.stash[_DECLARED] = settings
    return result


def _is_asked_for(config: pytest.Config, args: Iterable[str]) -> bool:
    if config.known_args_namespace.help:
        return False
    # An xdist worker gets the controller's options as values, not as arguments.
    given = (name for name, value in vars(config.option).items() if value is not None)
    ini = config.inipath.read_bytes() if config.inipath else b""
    named = b"modelhealth_" in ini or any("modelhealth" in text for text in (*args, *given))
    return named or bool(implementors(config))


def _declared(settings: Settings) -> dict[str, Setting]:
    """Return what may be set by its name: all settings, and `waive`, which calls say otherwise."""
    from pytest_modelhealth.settings.waiver import WAIVE

    return {setting.name: setting for setting in (*settings.declarations, WAIVE)}


def pytest_configure(config: pytest.Config) -> None:
    """Read the ini file and the command line once.

    Raises:
        pytest.UsageError: a value is not one of its setting.
    """
    settings = config.stash.get(_DECLARED, None)
    if settings is None:
        return
    declared = _declared(settings)
    try:
        for setting in declared.values():
            settings = _with_ini_value(settings, setting, config)
        for name, values in _given(config.getoption(_OPTION) or (), declared).items():
            settings = _read(settings, declared[name], values, f"{_OPTION} {name}")
    except SettingsError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[_SETTINGS] = settings


def session_settings(config: pytest.Config) -> Settings:
    """Return the settings that hold for every test without markers of its own."""
    if _SETTINGS not in config.stash:
        config.stash[_SETTINGS] = settings_with_own_checks(config)
    return config.stash[_SETTINGS]


def _ini(setting: Setting) -> str:
    return f"modelhealth_{setting.name}"


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


def _given(texts: Iterable[str], declared: dict[str, Setting]) -> dict[str, list[str]]:
    """Return what the command line gives each setting, the last word of one that takes no list.

    Raises:
        SettingsError: a text is not ``NAME=VALUE``, or there is no such name.
    """
    from pytest_modelhealth.settings import Settings

    given: dict[str, list[str]] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise SettingsError(
                f"{_OPTION} takes NAME=VALUE, such as max_grad_norm=10, not {text!r}"
            )
        setting = Settings(declared.values()).declared(name.strip().replace("-", "_"), _OPTION)
        before = given.get(setting.name, ()) if setting.takes_lines else ()
        given[setting.name] = [*before, value]
    return given


def _read(settings: Settings, setting: Setting, value: str | list[str], origin: str) -> Settings:
    text = "\n".join(value) if isinstance(value, list) else value
    if setting.name == "waive":
        from pytest_modelhealth.settings.waiver import parse_waivers

        return settings.waive(*parse_waivers(text, origin))
    return settings.read(setting.name, text, origin)
