"""Verdict, culprit and check as properties of each test in JUnit XML (``--junitxml=PATH``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelhealth.plugin.attachments import Evidence, start_snapshot_checks, told

if TYPE_CHECKING:
    from collections.abc import Generator

_EVIDENCE = pytest.StashKey[Evidence]()
_TOLD = pytest.StashKey["list[tuple[str, str]]"]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Follow what becomes of snapshots."""
    if _is_wanted(item.config):
        start_snapshot_checks(item)


def pytest_modelhealth_attach(item: pytest.Item, evidence: Evidence) -> None:
    """Keep the first evidence of a failing test."""
    if _is_wanted(item.config):
        item.stash.setdefault(_EVIDENCE, evidence)


# Outside of what attaches the evidence.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the properties before teardown, whose report pytest writes them from."""
    report = yield
    if not _is_wanted(item.config):
        return report
    evidence = item.stash.get(_EVIDENCE, None)
    if call.when == "call" or (report.failed and evidence is not None):
        before = item.stash.get(_TOLD, [])  # of a run of the test that did not count
        item.user_properties[:] = [one for one in item.user_properties if one not in before]
        said = list(told(item, evidence).items())
        item.stash[_TOLD] = said
        item.user_properties += said
    if call.when == "teardown":
        report.user_properties = list(item.user_properties)
        start_snapshot_checks(item)
        if evidence is not None:
            del item.stash[_EVIDENCE]
    return report


def _is_wanted(config: pytest.Config) -> bool:
    return bool(config.getoption("xmlpath", None))
