"""Text, figures and data in Allure's results, where allure-pytest is installed and asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelhealth.plugin.attachments import Evidence, start_snapshot_checks, told

if TYPE_CHECKING:
    from collections.abc import Generator

_EVIDENCE = pytest.StashKey[Evidence]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Follow what becomes of snapshots."""
    if _is_wanted(item.config):
        start_snapshot_checks(item)


def pytest_modelhealth_attach(item: pytest.Item, evidence: Evidence) -> None:
    """Attach what failed and what it is seen by."""
    if not _is_wanted(item.config):
        return
    import allure

    kinds = allure.attachment_type
    item.stash.setdefault(_EVIDENCE, evidence)
    allure.attach(evidence.failure_text, "model health", kinds.TEXT)
    if evidence.text:
        allure.attach(evidence.text, evidence.title, kinds.TEXT)
    for name, png in evidence.figures.items():
        allure.attach(png, name.replace("_", " "), kinds.PNG)
    allure.attach(evidence.json, "report.json", kinds.JSON)


# Outside of what attaches the evidence.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Label the test with verdict, culprit and check.

    Labels, not parameters: these tell one test from another in Allure's history.
    """
    report = yield
    if not _is_wanted(item.config):
        return report
    evidence = item.stash.get(_EVIDENCE, None)
    if call.when == "call" or (report.failed and evidence is not None):
        import allure

        for name, value in told(item, evidence).items():
            allure.dynamic.label(name, value)  # type: ignore[no-untyped-call]
        if evidence is not None:
            del item.stash[_EVIDENCE]
    if call.when == "teardown":
        start_snapshot_checks(item)
    return report


def _is_wanted(config: pytest.Config) -> bool:
    return config.pluginmanager.hasplugin("allure_listener")
