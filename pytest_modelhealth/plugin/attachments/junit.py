"""Verdict, culprit and check as properties of each test in JUnit XML (``--junitxml=PATH``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelhealth.plugin.attachments import told_at_end

if TYPE_CHECKING:
    from collections.abc import Generator

_TOLD = pytest.StashKey[list[tuple[str, object]]]()


# Outside of what attaches the evidence.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the properties before teardown, whose report pytest writes them from."""
    report = yield
    if not item.config.getoption("xmlpath", None):
        return report
    told = told_at_end(item, report)
    if told is not None:
        before = item.stash.get(_TOLD, [])  # of a run of the test that did not count
        item.user_properties[:] = [one for one in item.user_properties if one not in before]
        properties: list[tuple[str, object]] = list(told.items())
        item.stash[_TOLD] = properties
        item.user_properties += properties
    if call.when == "teardown":
        report.user_properties = list(item.user_properties)
    return report
