"""The hook by which a project registers its own checks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelhealth.errors import SettingsError

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from pytest_modelhealth.checks import Check
    from pytest_modelhealth.settings import Settings

HOOK = "pytest_modelhealth_checks"
_ASKED = pytest.StashKey[list[object]]()


class HookSpecifications:
    """The specification of the hook."""

    @pytest.hookspec
    def pytest_modelhealth_checks(self) -> list[type[Check]]:
        """Return a project's own checks: subclasses of `pytest_modelhealth.Check`.

        It is called once, before options are parsed, so that each setting of these checks can
        be set too: in a plugin, in the root folder's ``conftest.py``, or in that of a folder which
        pytest is started on.
        """
        raise NotImplementedError


def settings_with_own_checks(config: pytest.Config) -> Settings:
    """Return the default settings of this package's checks and the project's.

    Raises:
        pytest.UsageError: the hook raises, or gives something that is no sound check.
    """
    from pytest_modelhealth.checks import with_own_checks
    from pytest_modelhealth.training import default_settings

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
