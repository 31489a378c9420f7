"""Runs the test of a bundle again, on what the bundle has in place of what the test makes anew."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.plugin.inspections import MAKER

if TYPE_CHECKING:
    from pytest_modelhealth.bundles.file import Bundle
    from pytest_modelhealth.bundles.replaying import SubstitutingInspector

_FROM = "--modelhealth-replay-from"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare what the command ``replay`` sets."""
    group = parser.getgroup("modelhealth")
    group.addoption(_FROM, default=None, help=argparse.SUPPRESS)


def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Run the one test in this process: a project's own `-n` would start workers for it."""
    if early_config.known_args_namespace.modelhealth_replay_from is not None and (
        early_config.pluginmanager.hasplugin("xdist")
    ):
        args += ["-n", "0"]


def pytest_configure(config: pytest.Config) -> None:
    """Read the bundle.

    Raises:
        pytest.UsageError: it cannot be read.
    """
    path = config.getoption(_FROM)
    if path is None:
        return
    from pytest_modelhealth.bundles.file import read

    try:
        bundle = read(path)
    except InspectionError as error:
        raise pytest.UsageError(str(error)) from None
    config.pluginmanager.register(_Replay(bundle), "modelhealth.replay_outcome")


class _Replay:
    """Has one inspection of the test be the bundle's; an end without it is wrong use."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._inspections = 0
        self._told: list[str] | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._inspections = 0
        item.stash[MAKER] = self._make

    def _make(self, *args: Any, **options: Any) -> SubstitutingInspector:
        from pytest_modelhealth.bundles.replaying import SubstitutingInspector

        made = SubstitutingInspector(*args, **options)
        made.bundle, made.is_meant, made.on_replay = self._bundle, self._is_meant, self._note
        return made

    def _is_meant(self) -> bool:
        self._inspections += 1
        test = self._bundle.content["test"]
        return test is not None and self._inspections == test["number"]

    def _note(self, told: list[str]) -> None:
        self._told = told

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._told is None:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._told or [self._why_not()]:
            terminalreporter.write_line(f"modelhealth: {line}")

    def _why_not(self) -> str:
        test = self._bundle.content["test"]
        if test is None or not self._inspections or self._inspections >= test["number"]:
            return "the inspection of the bundle was not replayed; what stopped it stands above"
        return (
            f"nothing was replayed: the bundle is of inspection {test['number']} of its test, "
            f"which made {self._inspections}"
        )
