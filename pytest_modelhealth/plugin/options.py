"""Settings, waivers and own checks: default < ini < option < marker, the closest one last.

The ini names are declared when something asks for them: an argument or an ini value of ours, or a
project's own check. A suite that does not use the plugin then loads no check at its start, and
``pytest --help``, which would print a line for each name, has none: ``--modelhealth-explain`` does.
"""

from __future__ import annotations

import re
import sys
from argparse import ArgumentError
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.config import create_terminal_writer

from pytest_modelhealth.errors import SettingsError, suggest
from pytest_modelhealth.wings import why_missing

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable
    from pathlib import Path

    from _pytest.nodes import Node

    from pytest_modelhealth.settings import Setting, Settings
    from pytest_modelhealth.settings.setting import Waiver

_DECLARED = pytest.StashKey["Settings"]()
_SETTINGS = pytest.StashKey["Settings"]()


_OPTION, _INI = "--modelhealth-set", "modelhealth_"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the one option for all settings, and a short one for new projects."""
    group = parser.getgroup("modelhealth", "model health")
    group.addoption(
        _OPTION,
        action="append",
        dest="modelhealth_set",
        metavar="NAME=VALUE",
        help="a setting, such as max_grad_norm=10 or checks=finite; repeatable; in an ini file "
        "modelhealth_NAME = VALUE; --modelhealth-explain lists them all",
    )
    group.addoption(
        "--modelhealth-strict",
        action="append_const",
        const="strict=true",
        dest="modelhealth_set",
        help="what only warns fails; in an ini file modelhealth_strict = true",
    )


@pytest.hookimpl(wrapper=True)
def pytest_load_initial_conftests(
    early_config: pytest.Config, parser: pytest.Parser, args: list[str]
) -> Generator[None, Any, Any]:
    """Declare every setting as soon as each conftest.py that can give own checks is loaded.

    Raises:
        pytest.UsageError: a conftest.py declares an option that is one of ours.
    """
    try:
        result = yield
    except (ValueError, ArgumentError) as error:
        taken = re.search(r"--modelhealth[\w-]*", str(error))
        if taken is None:
            raise
        entries = pytest.ExceptionInfo.from_exception(error).traceback
        at = [one for one in entries if one.name == "pytest_addoption"][-1:]
        where = "".join(f"{one.path}:{one.lineno + 1}: " for one in at)
        raise pytest.UsageError(
            f"{where}{taken[0]} is an option of pytest-modelhealth already: give this one another "
            "name, or switch the plugin off with -p no:modelhealth"
        ) from None
    if _is_asked_for(early_config, args):
        settings = settings_with_own_checks(early_config)
        for name, setting in _declared(settings).items():
            kind: Any = str | setting.type
            if setting.takes_lines:
                kind = "linelist"
            elif pytest.version_tuple < (9, 2) or setting.type is str:
                # Text first, so that `parse` reads what ini files hold; from 9.2 on, [tool.pytest]
                # in TOML may hold the number itself.
                kind = "string"
            parser.addini(_INI + name, f"as {_OPTION} {name}", type=kind, default=None)
        early_config.stash[_DECLARED] = settings
    return result


def require_wing(name: str, option: str) -> None:
    """Do nothing if the wing that an option is for is there.

    Raises:
        pytest.UsageError: it is not.
    """
    if missing := why_missing(name):
        raise pytest.UsageError(f"{option}: {missing}")


def _is_asked_for(config: pytest.Config, args: Iterable[str]) -> bool:
    if config.known_args_namespace.help:
        return False
    # An xdist worker gets the controller's options as values, not as arguments.
    given = (name for name, value in vars(config.option).items() if value is not None)
    ini = config.inipath.read_bytes() if config.inipath else b""
    named = _INI.encode() in ini or any("modelhealth" in text for text in (*args, *given))
    return named or bool(implementors(config))


def _declared(settings: Settings) -> dict[str, Setting]:
    """Return what may be set by its name: all settings, and `waive`, which calls say otherwise."""
    from pytest_modelhealth.settings.setting import WAIVE

    return {setting.name: setting for setting in (*settings.declarations, WAIVE)}


def pytest_configure(config: pytest.Config) -> None:
    """Register both markers, and read the ini file and the command line once.

    Raises:
        pytest.UsageError: a value is not one of its setting.
    """
    for text in (
        (
            f"{SETTINGS_MARKER}(**settings): thresholds and other settings of pytest-modelhealth "
            "for this test, such as max_grad_norm=10.0; the closest marker wins."
        ),
        (
            f"{WAIVER_MARKER}(*layers, check=None, reason): accept violations of a check (of all "
            "checks without one) on these layers, names or shell wildcards, and say why."
        ),
    ):
        config.addinivalue_line("markers", text)
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


def pytest_cmdline_main(config: pytest.Config) -> int | pytest.ExitCode | None:
    """Print what is checked, or limits in force, in place of running tests, where that is asked.

    Raises:
        pytest.UsageError: no check has this name.
    """
    checks = config.getoption("--modelhealth-explain")
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


def _with_ini_value(settings: Settings, setting: Setting, config: pytest.Config) -> Settings:
    name = _INI + setting.name
    overridden = [text.partition("=")[0] for text in config.getoption("override_ini") or ()]
    origin = f"--override-ini {name}"
    if config.inipath is not None and name not in overridden:
        origin = f"{config.inipath.name}: {name}"
    try:
        value = config.getini(name)
    except (TypeError, ValueError) as error:  # before 9.2, a number in [tool.pytest]
        spelling = "as a list of strings" if setting.takes_lines else "in quotes"
        raise SettingsError(f"{origin}: write the value {spelling}; {error}") from None
    if value is None:
        return settings
    if isinstance(value, str | list):
        return _read(settings, setting, value, origin)
    return settings.override({setting.name: value}, origin)


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
        from pytest_modelhealth.settings.setting import parse_waivers

        return settings.waive(*parse_waivers(text, origin))
    return settings.read(setting.name, text, origin)


# A project's own checks.

HOOK = "pytest_modelhealth_checks"
_ASKED = pytest.StashKey[list[object]]()


def settings_with_own_checks(config: pytest.Config) -> Settings:
    """Return the default settings of this package's checks and the project's.

    Raises:
        pytest.UsageError: the hook raises, or gives something that is no sound check.
    """
    from pytest_modelhealth.checks import default_settings, with_own_checks

    config.stash[_ASKED] = implementors(config)
    try:
        given: list[Any] = config.pluginmanager.hook.pytest_modelhealth_checks()
    except Exception as error:
        raise pytest.UsageError(f"{HOOK} raised {type(error).__name__}: {error}") from error
    settings = default_settings()
    try:
        for own in reversed(given):  # pluggy asks the one registered last first
            settings = with_own_checks(settings, own, HOOK)
    except SettingsError as error:
        raise pytest.UsageError(str(error)) from None
    return settings


def implementors(config: pytest.Config) -> list[object]:
    """Return the plugins, among them each conftest.py, that have the hook."""
    caller = config.pluginmanager.hook.pytest_modelhealth_checks
    return [implementation.plugin for implementation in caller.get_hookimpls()]


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> Generator[None, Any, Any]:
    """Refuse tests whose conftest.py gives checks after they were asked for.

    Raises:
        pytest.Collector.CollectError: pytest prints its text alone.
    """
    asked = parent.config.stash.get(_ASKED, [])  # empty where nobody asked: no check was known
    for late in implementors(parent.config):
        if late not in asked:
            where = getattr(late, "__file__", None) or repr(late)
            raise parent.CollectError(
                f"{where}: {HOOK} comes too late: options were parsed already. Move it to the "
                f"conftest.py of {parent.config.rootpath}, or start pytest on this folder."
            )
    return (yield)


# Markers, checked when a test is set up.

SETTINGS_MARKER = "modelhealth"
WAIVER_MARKER = "modelhealth_waive"


def require_settings(item: pytest.Item) -> Settings:
    """Return what `settings_for` does, or fail the test with the text of its error alone."""
    try:
        return settings_for(item)
    except SettingsError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None


def settings_for(item: Node) -> Settings:
    """Return the session's settings with the markers of `item` laid over them.

    Raises:
        SettingsError: a marker has a wrong argument; the message names the test.
    """
    settings = session_settings(item.config)
    markers = list(item.iter_markers_with_node(name=SETTINGS_MARKER))
    for node, marker in reversed(markers):  # the closest comes last and wins
        origin = _origin(node, marker)
        if marker.args:
            raise SettingsError(
                f"{origin}: takes keywords only, such as max_grad_norm=10.0, "
                f"not {', '.join(map(repr, marker.args))}"
            )
        settings = settings.override(marker.kwargs, origin)
    for node, marker in item.iter_markers_with_node(name=WAIVER_MARKER):
        settings = settings.waive(*_parse_waiver(marker, _origin(node, marker)))
    return settings


def _parse_waiver(marker: pytest.Mark, origin: str) -> list[Waiver]:
    from pytest_modelhealth.settings.setting import Waiver

    unknown = sorted(set(marker.kwargs) - {"check", "reason"})
    if unknown:
        raise SettingsError(
            f"{origin}: unknown keyword {unknown[0]!r}{suggest(unknown[0], ('check', 'reason'))} "
            "It takes layers, check= and reason=."
        )
    if not marker.args:
        raise SettingsError(
            f"{origin}: name the layers as strings first, such as 'encoder.*'; '*' is all of them"
        )
    check, reason = marker.kwargs.get("check"), marker.kwargs.get("reason", "")
    return [Waiver(layers, check, reason, origin) for layers in marker.args]


def _origin(node: Node, marker: pytest.Mark) -> str:
    name = getattr(node, "originalname", None) or node.name  # without [parameters]
    return f"@{marker.name} on {'class ' if isinstance(node, pytest.Class) else ''}{name}"
