"""The figures in pytest-html's report, where it is installed and --html was given."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

    from pytest_modelhealth.plugin.attachments import Evidence


def pytest_modelhealth_attach(
    item: pytest.Item, report: pytest.TestReport, evidence: Evidence
) -> None:
    """Add each figure to the extras of the test's row."""
    if not item.config.getoption("htmlpath", None):
        return
    from pytest_html import extras

    pictures = [
        extras.png(base64.b64encode(png).decode("ascii"), name.replace("_", " "))
        for name, png in evidence.figures.items()
    ]
    attached = getattr(report, "extras", [])
    report.extras = [*attached, *pictures]  # type: ignore[attr-defined]
