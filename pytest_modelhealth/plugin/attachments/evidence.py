"""The evidence in what is reported of a failing test: by the terminal, pytest-html and Allure."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from pytest_modelhealth.plugin.attachments import Evidence


def terminal(item: pytest.Item, report: pytest.TestReport, evidence: Evidence) -> None:
    """Append text histograms; where the test failed for another reason, behind the verdict."""
    if item.config.getoption("tbstyle", "auto") in ("line", "no"):
        return
    verdict = "" if evidence.explains_failure else f"{evidence.report!r}\n"
    if evidence.text:
        report.sections.append((f"modelhealth: {evidence.title}", verdict + evidence.text))


def html(item: pytest.Item, report: pytest.TestReport, evidence: Evidence) -> None:
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


def allure(evidence: Evidence) -> None:
    """Attach text, figures and data to Allure's results."""
    from allure import attach, attachment_type

    attach(evidence.failure_text, "model health", attachment_type.TEXT)
    if evidence.text:
        attach(evidence.text, evidence.title, attachment_type.TEXT)
    for name, png in evidence.figures.items():
        attach(png, name.replace("_", " "), attachment_type.PNG)
    attach(evidence.json, "report.json", attachment_type.JSON)


class _Plugin:
    """Has the hook, and a hash: pytest keeps plugins in sets where folders have their conftest."""

    def __init__(self, attach: Any) -> None:
        self.pytest_modelhealth_attach = attach


PLUGINS = {
    name: _Plugin(attach)
    for name, attach in (("allure", allure), ("html", html), ("terminal", terminal))
}
"""By the names that switch them off."""
