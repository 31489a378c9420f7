"""The `inspector` fixture, and the check of the reports whose verdict a test never asked for."""

from __future__ import annotations

import functools
import inspect
import sys
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Never, TypeGuard

import pytest

from pytest_modelhealth.errors import (
    InspectionError,
    ModelHealthWarning,
    NamesItsAttributes,
    SettingsError,
    checked_call,
    public_names,
    suggest,
)
from pytest_modelhealth.plugin import look_at_tests
from pytest_modelhealth.plugin.options import require_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from torch import nn

    from pytest_modelhealth.checks import Check
    from pytest_modelhealth.comparison.comparison import Comparison
    from pytest_modelhealth.inspector import Inspector
    from pytest_modelhealth.report import HealthReport
    from pytest_modelhealth.settings import Settings
    from pytest_modelhealth.settings.setting import Waiver

_PACKAGE = __name__.partition(".")[0]
_NOTED = 3
_ASIS = nullcontext()


class MadeResult(NamedTuple):
    """A report or a comparison, and the line of the user's code that made it."""

    report: HealthReport | Comparison
    path: Path
    line: int
    auto_check: bool


class UnaskedFailure(NamedTuple):
    """An unhealthy report whose verdict the test never asked for, and the error raised for it."""

    inspection: MadeResult
    error: Exception


class InspectorFixture(NamesItsAttributes):
    """Makes inspectors under the settings of one test, and keeps the reports they make.

    Args:
        settings: those of the test.
        around: makes each `run_inspection` in its place: it gets the inspector, that method and
            its arguments.
    """

    def __init__(self, settings: Settings, around: Callable[..., Any] | None = None) -> None:
        from pytest_modelhealth.settings import APPLICABLE  # a run without the fixture loads none

        if settings["probes"].origin == "default":
            settings = settings.override({"probes": APPLICABLE}, "default")
        self._settings = settings
        self._around = around
        self._inspections: list[MadeResult] = []
        self._never_run: dict[object, tuple[Path, int]] = {}
        self._checked: int | None = None

    def __call__(
        self,
        model: nn.Module,
        *batch: Never,
        own_checks: Iterable[type[Check]] = (),
        calibrate: bool | None = None,
        ranks: bool | None = None,
        **settings: object,
    ) -> Inspector:
        """Return an inspector of `model`; `settings` override those of the test.

        Raises:
            InspectionError: `model` is nothing that can be inspected.
            SettingsError: a setting has an unknown name, a wrong type or an impossible value.
        """
        from pytest_modelhealth.inspector import Inspector  # brings torch

        made = Inspector(
            model,
            *batch,  # refused there
            settings=self._settings,
            on_report=self._keep_report,
            own_checks=own_checks,
            calibrate=calibrate,
            ranks=ranks,
            **settings,
        )
        if self._around is not None:
            run = partial(self._around, made, made.run_inspection)
            made.run_inspection = run  # type: ignore[method-assign]
        self._never_run[key := object()] = calling_line()
        made._on_run = partial(self._never_run.pop, key, None)
        return made

    @checked_call(switches=False)
    def compare(
        self,
        reference: Any,
        candidate: Any,
        inputs: Any,
        target: Any = None,
        *,
        auto_check: bool | None = None,
        **options: Any,
    ) -> Comparison:
        """Compare two models on one batch, as `pytest_modelhealth.compare` does.

        A comparison whose verdict the test does not ask for is checked when the test's body ends,
        unless `auto_check` is false; ``None`` takes the setting of the test.

        Raises:
            InspectionError: one of the two is nothing that can be run.
            SettingsError: `auto_check` is no truth value.
            Exception: whatever a model or the loss raises, with a note on which of the two ran.
        """
        from pytest_modelhealth.comparing import compare  # brings torch

        given = {} if auto_check is None else {"auto_check": auto_check}
        settings = self._settings.override(given, "argument of compare")
        comparison = compare(reference, candidate, inputs, target, **options)
        self._keep(comparison, settings)
        return comparison

    @property
    def made(self) -> list[MadeResult]:
        """Everything made so far, comparisons too, each with the line that made it."""
        return list(self._inspections)

    @property
    def reports(self) -> list[HealthReport]:
        """Every report made so far in this test, its fixtures included, the oldest first."""
        return [i.report for i in self._inspections if is_report(i.report)]

    @property
    def settings(self) -> Settings:
        """The settings of this test: default < ini < option < marker."""
        return self._settings

    def __repr__(self) -> str:
        made = len(self._inspections)
        return f"<inspector with {made} report{'' if made == 1 else 's'}>"

    def _without(self, name: str) -> str:
        from pytest_modelhealth.inspector import Inspector  # brings torch

        own, others = public_names(InspectorFixture), public_names(Inspector)
        if name in others:
            call = "(...)" if callable(getattr(Inspector, name)) else ""
            return f"inspector.{name} needs the model first: inspector(model).{name}{call}"
        return (
            f"inspector has no {name!r}{suggest(name, (*own, *others))} It has {', '.join(own)}, "
            f"and inspector(model) has {', '.join(others)}."
        )

    def _keep_report(self, report: HealthReport) -> None:
        self._keep(report, report._settings)

    def _keep(self, report: HealthReport | Comparison, settings: Settings) -> None:
        auto_check = settings["auto_check"].value
        self._inspections.append(MadeResult(report, *calling_line(), auto_check))


INSPECTOR = pytest.StashKey[InspectorFixture]()
AROUND = pytest.StashKey["Callable[..., HealthReport]"]()
"""What makes the inspections of a test, where a part of the plugin sets it before the test."""
UNASKED_FAILURE = pytest.StashKey[UnaskedFailure]()


@pytest.fixture
def inspector(request: pytest.FixtureRequest) -> Iterator[InspectorFixture]:
    """Inspect a PyTorch model layer by layer: ``inspector(model).run_inspection(batch)``.

    A report whose verdict the test does not ask for is checked when the test's body ends.
    """
    # Another fixture may have added a marker since the setup began.
    fixture = InspectorFixture(require_settings(request.node), request.node.stash.get(AROUND, None))
    request.node.stash[INSPECTOR] = fixture
    yield fixture
    del request.node.stash[INSPECTOR]
    if fixture._checked is not None:  # the body passed; what other fixtures' teardown inspected
        _check_unasked(fixture, request.node)
        for path, line in fixture._never_run.values():
            warn(
                request.node,
                f"{path.name}:{line}: this inspector was made and never run, so nothing was "
                "inspected: call .run_inspection(batch)",
            )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Check reports where the body passed: here the test fails, in teardown it would error.

    Then warn of what only warns, and of waivers that waived nothing. An exception of the body
    passes through the `yield`.
    """
    fixture = item.stash.get(INSPECTOR, None)
    try:
        with _ASIS if fixture is None else _checked_by_example(fixture, item):
            result = yield
    finally:
        look_at_tests(item.config)  # its body may have been the first to use something of ours
    fixture = item.stash.get(INSPECTOR, None)
    if fixture is None:
        return result
    _check_unasked(fixture, item)
    for report in fixture.reports:
        for text in report._take_warnings():
            warn(item, text)
    for waiver in _unused_waivers(fixture):
        warn(
            item,
            f"{waiver.origin}: nothing is left to waive for ({waiver}); remove it, or correct its "
            f"layers if it was meant to match (its reason: {waiver.reason})",
        )
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter,
) -> Generator[None, None, None]:
    """Say what was warned of, once a cause, in the place of once a test among other warnings."""
    rows = left_on_reports(terminalreporter, "modelhealth_warnings")
    if not rows or not terminalreporter.hasopt("w"):
        return (yield)
    texts, every = {text for _, text, _ in rows}, terminalreporter.stats.get("warnings", [])
    others = [one for one in every if not any(text in one.message for text in texts)]
    terminalreporter.stats["warnings"] = others
    yield
    terminalreporter.stats["warnings"] = every  # they count
    terminalreporter.section("modelhealth warnings", yellow=True)
    for cause in dict.fromkeys(cause for cause, *_ in rows):
        first, *more = dict.fromkeys(text for one, text, _ in rows if one == cause)
        lines = [first, *(f"likewise:     {text.splitlines()[0]}" for text in more[:_NOTED])]
        tests = dict.fromkeys(test for one, _, test in rows if one == cause)
        left = f" and {len(tests) - _NOTED:,} more" * (len(tests) > _NOTED)
        lines.append(f"in tests:     {', '.join([*tests][:_NOTED])}{left}")
        terminalreporter.write_line("\n".join(lines))


def _unused_waivers(fixture: InspectorFixture) -> list[Waiver]:
    """Return the waivers of this test and its calls that no judgement needed.

    Those of the ini file and the command line are for all tests together.
    """
    judgements = [judgement for report in fixture.reports for judgement in report._judgements]
    used = {found.waiver for judgement in judgements for found in judgement.waived}
    idle = [waiver for judgement in judgements for waiver in judgement.unused_waivers]
    return [w for w in dict.fromkeys(idle) if w not in used and not w.shared]


@contextmanager
def _checked_by_example(fixture: InspectorFixture, item: pytest.Item) -> Iterator[None]:
    """Have each example of a ``@given`` test end with the check of its reports, so that it shrinks.

    Hypothesis runs the body once an example. What is found only after the last of them it never
    sees: it neither shrinks that example nor shows it. Reports of an example that was rejected, or
    failed and is tried again, are dropped.
    """
    # Where hypothesis lets other plugins replace the body; it is never imported for this.
    handle: Any = getattr(getattr(item, "obj", None), "hypothesis", None)
    is_run = "hypothesis" in sys.modules and hasattr(handle, "inner_test")
    if not is_run:
        yield
        return
    body, made = handle.inner_test, fixture._inspections
    finished = len(made)

    @contextmanager
    def example() -> Iterator[None]:
        nonlocal finished
        del made[finished:]
        yield
        fixture._checked = finished
        try:
            _check_unasked(fixture, item)
        finally:
            fixture._checked = None  # the whole body has not passed yet
        finished = len(made)

    @functools.wraps(body)
    def run(*args: Any, **kwargs: Any) -> Any:
        with example():
            return body(*args, **kwargs)

    @functools.wraps(body)
    async def run_async(*args: Any, **kwargs: Any) -> Any:
        with example():
            return await body(*args, **kwargs)

    handle.inner_test = run_async if inspect.iscoroutinefunction(body) else run
    try:
        yield
    finally:
        handle.inner_test = body
    del made[finished:]


def _check_unasked(fixture: InspectorFixture, item: pytest.Item) -> None:
    failures = []
    made = fixture._inspections[fixture._checked or 0 :]
    fixture._checked = len(fixture._inspections)
    unasked = [one for one in made if one.auto_check and not one.report._verdict_asked]
    for inspection in unasked:
        try:
            error: Exception | None = inspection.report._failure()
        except (InspectionError, SettingsError) as cannot_judge:
            error = cannot_judge
        if error is not None:
            failures.append(UnaskedFailure(inspection, error))
    if failures:
        first, *others = failures
        if others:
            noun = "inspection" if len(others) == 1 else "inspections"
            lines = [f"{len(others)} more {noun} of this test failed:"]
            for (_, path, line, _), error in others[:_NOTED]:
                lines.append(f"  {path.name}:{line}: {headline(error)}")
            if len(others) > _NOTED:
                lines.append(f"  ... and {len(others) - _NOTED} more")
            first.error.add_note("\n".join(lines))
        first.error.add_note(
            "The test did not ask for this report's verdict, so it was checked when the test ended;"
            "\nfor numbers alone: @pytest.mark.modelhealth(auto_check=False)"
        )
        item.stash[UNASKED_FAILURE] = first
        raise first.error
    for report in (i.report for i in unasked if is_report(i.report)):
        for text in report._take_doubt():
            warn(item, text)


def warn(item: pytest.Item, text: str) -> None:
    """Warn of something in a test, which fails it where warnings are errors."""
    is_error = True
    with suppress(ModelHealthWarning):  # under -W error; its traceback would lead through pytest
        item.warn(ModelHealthWarning(text))
        is_error = False
    if is_error:
        pytest.fail(text, pytrace=False)


def left_on_reports(terminalreporter: pytest.TerminalReporter, name: str) -> list[Any]:
    """Return what the lists of a name on tests' reports hold, also from xdist's workers."""
    reports = (report for reports in terminalreporter.stats.values() for report in reports)
    return [one for report in reports for one in getattr(report, name, ())]


def is_report(made: object) -> TypeGuard[HealthReport]:
    """Whether something is the report on one model, rather than a comparison of two."""
    from pytest_modelhealth.report import HealthReport  # not loaded by a run without reports

    return isinstance(made, HealthReport)


def headline(error: BaseException) -> str:
    """Return the first line of an error's text."""
    return str(error).partition("\n")[0]


def calling_line() -> tuple[Path, int]:
    """Return the line that called into this package."""
    frame = sys._getframe()
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE:
        frame = frame.f_back
    return Path(frame.f_code.co_filename), frame.f_lineno
