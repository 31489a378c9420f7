"""The `inspector` fixture, and the check of the reports that a test never looked at."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Never, NoReturn

import pytest

from pytest_modelhealth.errors import (
    InspectionError,
    SettingsError,
    UnknownNameError,
    public_names,
    suggest,
)
from pytest_modelhealth.plugin.markers import settings_for

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from torch import nn

    from pytest_modelhealth.capture.engine import Compiled
    from pytest_modelhealth.checks import Check
    from pytest_modelhealth.comparison.comparison import Comparison
    from pytest_modelhealth.inspector import Inspector
    from pytest_modelhealth.report import HealthReport
    from pytest_modelhealth.settings import Settings

_PACKAGE = __name__.partition(".")[0]
_NOTED = 3


class Inspection(NamedTuple):
    """A report or a comparison, and the line of the user's code that asked for it."""

    report: HealthReport | Comparison
    path: Path
    line: int


class UnreadFailure(NamedTuple):
    """An unhealthy report that the test never looked at, and the error raised for it."""

    inspection: Inspection
    error: Exception


class InspectorFixture:
    """Makes inspectors under the settings of one test, and keeps the reports they make."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._inspections: list[Inspection] = []
        self._checked: int | None = None

    def __call__(
        self,
        model: nn.Module,
        *batch: Never,
        compiled: Compiled = "eager",
        own_checks: Iterable[type[Check]] = (),
        calibrate: bool | None = None,
        **settings: object,
    ) -> Inspector:
        """Return an inspector of `model`; `settings` override those of the test.

        Raises:
            InspectionError: `model` is nothing that can be inspected.
            SettingsError: a setting has an unknown name, a wrong type or an impossible value.
        """
        from pytest_modelhealth.inspector import Inspector  # brings torch

        return Inspector(
            model,
            *batch,  # refused there
            compiled=compiled,
            settings=self._settings,
            on_report=self._keep,
            own_checks=own_checks,
            calibrate=calibrate,
            **settings,
        )

    if not TYPE_CHECKING:  # a type checker knows the names by itself

        def __getattr__(self, name: str) -> NoReturn:
            if name.startswith("_"):
                raise AttributeError(name)  # what copy, pickle and others ask for
            raise UnknownNameError(_without_model(name))

    def compare(
        self,
        reference: Any,
        candidate: Any,
        inputs: Any,
        target: Any = None,
        **options: Any,
    ) -> Comparison:
        """Compare two models on one batch, as `pytest_modelhealth.compare` does.

        A comparison whose verdict the test does not ask for is checked when the test's body ends.

        Raises:
            InspectionError: one of the two is nothing that can be run.
            Exception: whatever a model or the loss raises, with a note on which of the two ran.
        """
        from pytest_modelhealth.comparison.compare import compare  # brings torch

        comparison = compare(reference, candidate, inputs, target, **options)
        self._keep(comparison)
        return comparison

    @property
    def reports(self) -> list[HealthReport]:
        """Every report made so far in this test, its fixtures included, the oldest first."""
        from pytest_modelhealth.report import HealthReport  # not loaded by a run without reports

        made = (inspection.report for inspection in self._inspections)
        return [report for report in made if isinstance(report, HealthReport)]

    @property
    def settings(self) -> Settings:
        """The settings of this test: default < ini < option < marker."""
        return self._settings

    def __repr__(self) -> str:
        made = len(self._inspections)
        return f"<inspector with {made} report{'' if made == 1 else 's'}>"

    def _keep(self, report: HealthReport | Comparison) -> None:
        self._inspections.append(Inspection(report, *_calling_line()))

    def _take_unread(self) -> list[Inspection]:
        unread = [i for i in self._inspections[self._checked or 0 :] if not i.report.looked_at]
        self._checked = len(self._inspections)
        return unread


INSPECTOR = pytest.StashKey[InspectorFixture]()
UNREAD_FAILURE = pytest.StashKey[UnreadFailure]()


@pytest.fixture
def inspector(request: pytest.FixtureRequest) -> Iterator[InspectorFixture]:
    """Inspect a PyTorch model layer by layer: ``inspector(model).run_inspection(batch)``.

    A report that the test does not look at is checked when the test's body ends.
    """
    try:
        fixture = InspectorFixture(settings_for(request.node))
    except SettingsError as error:  # a marker added while the test ran
        pytest.fail(str(error), pytrace=False)
    request.node.stash[INSPECTOR] = fixture
    yield fixture
    del request.node.stash[INSPECTOR]
    if fixture._checked is not None:  # the body passed; what other fixtures' teardown inspected
        _check_unread(fixture, request.node)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Check unread reports where the body passed: here the test fails, in teardown it would error.

    An exception of the body passes through the `yield`.
    """
    result = yield
    fixture = item.stash.get(INSPECTOR, None)
    if fixture is not None:
        _check_unread(fixture, item)
    return result


def _check_unread(fixture: InspectorFixture, item: pytest.Item) -> None:
    failures = []
    for inspection in fixture._take_unread():
        try:
            error: Exception | None = inspection.report.failure()
        except (InspectionError, SettingsError) as cannot_judge:
            error = cannot_judge
        if error is not None:
            failures.append(UnreadFailure(inspection, error))
    if failures:
        first, *others = failures
        if others:
            first.error.add_note(_note_on(others))
        first.error.add_note(
            "The test did not look at this report, so it was checked when the test ended."
        )
        item.stash[UNREAD_FAILURE] = first
        raise first.error


def _without_model(name: str) -> str:
    """Return what to call instead of ``inspector.<name>``, which the fixture does not have."""
    from pytest_modelhealth.inspector import Inspector  # brings torch

    own, others = public_names(InspectorFixture), public_names(Inspector)
    if name in others:
        call = "(...)" if callable(getattr(Inspector, name)) else ""
        return f"inspector.{name} needs the model first: inspector(model).{name}{call}"
    return (
        f"inspector has no {name!r}{suggest(name, (*own, *others))} It has {', '.join(own)}, and "
        f"inspector(model) has {', '.join(others)}."
    )


def _note_on(others: list[UnreadFailure]) -> str:
    noun = "inspection" if len(others) == 1 else "inspections"
    lines = [f"{len(others)} more {noun} of this test failed:"]
    for (_, path, line), error in others[:_NOTED]:
        lines.append(f"  {path.name}:{line}: {headline(error)}")
    if len(others) > _NOTED:
        lines.append(f"  ... and {len(others) - _NOTED} more")
    return "\n".join(lines)


def headline(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return str(error).partition("\n")[0]


def _calling_line() -> tuple[Path, int]:
    frame = sys._getframe()
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE:
        frame = frame.f_back
    return Path(frame.f_code.co_filename), frame.f_lineno
