"""The figures in pytest-html's report, where it is installed and --html was given."""

from __future__ import annotations

import base64
from collections.abc import Generator
from typing import Any

import pytest

from pytest_modelhealth.plugin.attachments import Evidence

_PICTURES = pytest.StashKey[list[list[Any]]]()


def pytest_modelhealth_attach(item: pytest.Item, evidence: Evidence) -> None:
    """Make an extra of each figure; a second failing subtest's are called ``culprit 2``."""
    if not item.config.getoption("htmlpath", None):
        return
    from pytest_html import extras

    failures = item.stash.setdefault(_PICTURES, [])
    nth = f" {len(failures) + 1}" if failures else ""
    failures.append(
        [
            extras.png(base64.b64encode(png).decode("ascii"), name.replace("_", " ") + nth)
            for name, png in evidence.figures.items()
        ]
    )


# Outside of what attaches the evidence, as teardown may fail too.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Give the pictures to the test's last report.

    pytest-html shows the extras of each phase in the test's row, but of several reports of one
    phase, which subtests make, only those of the last.
    """
    report = yield
    if call.when == "teardown" and _PICTURES in item.stash:
        pictures = [picture for failure in item.stash[_PICTURES] for picture in failure]
        del item.stash[_PICTURES]
        report.extras = [*getattr(report, "extras", []), *pictures]  # type: ignore[attr-defined]
    return report
