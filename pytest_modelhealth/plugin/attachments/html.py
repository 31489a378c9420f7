"""The figures in pytest-html's report, where it is installed and --html was given."""

from __future__ import annotations

import base64

import pytest

from pytest_modelhealth.plugin.attachments import Evidence


def pytest_modelhealth_attach(
    item: pytest.Item, report: pytest.TestReport, evidence: Evidence
) -> None:
    """Make an extra of each figure; of failing subtests pytest-html shows the last one's."""
    if not item.config.getoption("htmlpath", None):  # under torchrun all but the first process
        return
    from pytest_html import extras

    report.extras = [  # type: ignore[attr-defined]
        *getattr(report, "extras", []),
        *(
            extras.png(base64.b64encode(png).decode("ascii"), name.replace("_", " "))
            for name, png in evidence.figures.items()
        ),
    ]
