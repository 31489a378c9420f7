"""Hands a failing test's evidence to every destination on the shelf `attachments`."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelhealth.errors import InspectionError, ModelHealthError, SettingsError
from pytest_modelhealth.plugin.attachments import EVIDENCE, Evidence
from pytest_modelhealth.plugin.inspections import INSPECTOR, is_report
from pytest_modelhealth.plugin.snapshots import SNAPSHOT_CHECKS

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_modelhealth.report import HealthReport


_SHOWN = pytest.StashKey["list[HealthReport]"]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach the evidence of the first unhealthy report to a failing test, whatever failed it."""
    report = yield
    if report.failed and call.excinfo is not None:
        try:
            _attach(item, report, call.excinfo.value)
        except Exception as error:  # noqa: BLE001 - a failing test must never be lost to its decoration
            text = f"the evidence could not be shown: {type(error).__name__}: {error}"
            report.sections.append(("modelhealth", text))
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
    """Keep nothing of a test that has ended, as items live as long as the session."""
    try:
        return (yield)
    finally:
        pytest_runtest_setup(item)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Begin anew, also where a test runs again."""
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
