"""Verdict, culprit and check as properties of each test in JUnit XML (``--junitxml=PATH``)."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from pytest_modelhealth.plugin.attachments import told_at_end

_TOLD = pytest.StashKey[dict[str, str]]()


# Outside of what attaches the evidence.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the properties to the report of teardown, which pytest writes them from."""
    report = yield
    if item.config.getoption("xmlpath", None):
        told = told_at_end(item, report)
        if told is not None:
            item.stash[_TOLD] = told
        if call.when == "teardown" and _TOLD in item.stash:
            report.user_properties = [*item.user_properties, *item.stash[_TOLD].items()]
            del item.stash[_TOLD]
    return report
