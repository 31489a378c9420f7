"""Runs the test of a bundle again, on what the bundle has in place of what the test makes anew."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.plugin.inspections import MAKER

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_modelhealth.bundles.file import Bundle
    from pytest_modelhealth.bundles.replaying import SubstitutingInspector

_FROM = "--modelhealth-replay-from"
_BUNDLE = pytest.StashKey["Bundle"]()
_SUBSTITUTION = pytest.StashKey["_Substitution"]()


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
        bundle = config.stash[_BUNDLE] = read(path)
    except InspectionError as error:
        raise pytest.UsageError(str(error)) from None
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Outcome(bundle), "modelhealth.replay_outcome")


class _Substitution:
    """Makes the inspectors of one test, of whose inspections one is the bundle's."""

    def __init__(self, bundle: Bundle) -> None:
        self.bundle = bundle
        self.inspections = 0
        self.told: list[str] | None = None

    def make(self, *args: Any, **options: Any) -> SubstitutingInspector:
        from pytest_modelhealth.bundles.replaying import SubstitutingInspector

        made = SubstitutingInspector(*args, **options)
        made.bundle = self.bundle
        made.is_meant, made.on_replay = self._is_meant, self._note
        return made

    def _is_meant(self) -> bool:
        self.inspections += 1
        test = self.bundle.content["test"]
        return test is not None and self.inspections == test["number"]

    def _note(self, notes: list[str]) -> None:
        self.told = notes


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have an inspection of this test be the bundle's."""
    bundle = item.config.stash.get(_BUNDLE, None)
    if bundle is not None:
        item.stash[_SUBSTITUTION] = _Substitution(bundle)
        item.stash[MAKER] = item.stash[_SUBSTITUTION].make


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, pytest.TestReport]:
    """Take what was told of the replay to the controller."""
    report: Any = yield
    substitution = item.stash.get(_SUBSTITUTION, None)
    if substitution is not None:
        report.modelhealth_inspections = substitution.inspections
        report.modelhealth_replayed = substitution.told
    return report  # type: ignore[no-any-return]


class _Outcome:
    """What became of the replay, as the test's report tells; an end without one is wrong use."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._inspections = 0
        self._told: list[str] | None = None

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._inspections = max(self._inspections, getattr(report, "modelhealth_inspections", 0))
        self._told = getattr(report, "modelhealth_replayed", None) or self._told

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
