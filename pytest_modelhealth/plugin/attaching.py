"""What each test's report gets: its evidence, and what the summary tells of it."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelhealth.errors import InspectionError, ModelHealthError, SettingsError
from pytest_modelhealth.plugin.attachments import EVIDENCE, Evidence
from pytest_modelhealth.plugin.inspections import INSPECTOR, is_report
from pytest_modelhealth.plugin.options import (
    SETTINGS_MARKER,
    WAIVER_MARKER,
    require_settings,
)
from pytest_modelhealth.plugin.snapshots import SNAPSHOT_CHECKS
from pytest_modelhealth.plugin.suites import is_suite

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_modelhealth.report import HealthReport


_SHOWN = pytest.StashKey["list[HealthReport]"]()
_UPDATES = ("update_snapshots", "update_new_snapshots_only")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the evidence of the first unhealthy report to a failing test, whatever failed it.

    What the summary tells is left on the report, as text that crosses from xdist's workers. A
    skipped test of a suite names the user's file.
    """
    report = yield
    if report.failed and call.excinfo is not None:
        try:
            _attach(item, report, call.excinfo.value)
        except Exception as error:  # noqa: BLE001 - a failing test must never be lost to its decoration
            text = f"the evidence could not be shown: {type(error).__name__}: {error}"
            report.sections.append(("modelhealth", text))
    made: Any = report
    fixture = item.stash.get(INSPECTOR, None)
    if call.when == "call":
        reports = fixture.reports if fixture is not None else ()
        warned = (one for report in reports for one in report._warnings().items())
        made.modelhealth_warnings = [[*one, item.nodeid] for one in warned]
        checks = item.stash.get(SNAPSHOT_CHECKS, [])
        written = [{"file": c.file, "change": c.change} for c, *_ in checks if c.change]
        made.modelhealth_snapshots = written
    is_ours = fixture is not None and isinstance(item, pytest.Function) and is_suite(item.cls)
    if is_ours and report.skipped and isinstance(report.longrepr, tuple):
        path, line, _ = item.location
        report.longrepr = (path, (line or 0) + 1, report.longrepr[2])
    return report


def _attach(item: pytest.Item, report: pytest.TestReport, error: BaseException) -> None:
    judged: Any = error.report if isinstance(error, ModelHealthError) else None
    found = _first_unhealthy(item) if judged is None else judged
    if found is None:
        return
    if is_report(found):
        if not found._judgement.violations:
            return
        item.stash.setdefault(_SHOWN, []).append(found)
    evidence = Evidence(found, explains_failure=found is judged)
    item.stash.setdefault(EVIDENCE, (evidence, report.when))
    item.ihook.pytest_modelhealth_attach(item=item, report=report, evidence=evidence)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Keep nothing of a test that has ended, as items live as long as the session.

    The inspectors of a test that records a snapshot measure the noise of what they see.
    """
    updates = any(getattr(item.config.option, name, False) for name in _UPDATES)
    records = updates and "health_snapshot" in getattr(item, "fixturenames", ())
    try:
        with _measuring_noise() if records else nullcontext():
            return (yield)
    finally:
        _forget(item)


@contextmanager
def _measuring_noise() -> Generator[None, None, None]:
    from pytest_modelhealth.inspector import RECORDING  # brings torch

    token = RECORDING.set(True)
    try:
        yield
    finally:
        RECORDING.reset(token)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin anew, also where a test runs again; one whose markers are wrong ends here."""
    _forget(item)
    if any(item.get_closest_marker(name) for name in (SETTINGS_MARKER, WAIVER_MARKER)):
        require_settings(item)


def _forget(item: pytest.Item) -> None:
    keys: tuple[pytest.StashKey[Any], ...] = (EVIDENCE, _SHOWN, SNAPSHOT_CHECKS)
    for key in keys:
        if key in item.stash:
            del item.stash[key]


def _first_unhealthy(item: pytest.Item) -> HealthReport | None:
    fixture = item.stash.get(INSPECTOR, None)
    shown = [id(report) for report in item.stash.get(_SHOWN, [])]  # below an earlier subtest
    for report in fixture.reports if fixture is not None else ():
        if report._settings["auto_check"].value and id(report) not in shown:
            # one that cannot be judged says so where the test asks
            with suppress(InspectionError, SettingsError):
                if report._judgement.verdict == "unhealthy":
                    return report
    return None
