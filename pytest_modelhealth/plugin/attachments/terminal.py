"""Text histograms of the culprit beside its predecessor, in a section below the failure."""

from __future__ import annotations

import pytest

from pytest_modelhealth.plugin.attachments import Evidence


def pytest_modelhealth_attach(
    item: pytest.Item, report: pytest.TestReport, evidence: Evidence
) -> None:
    """Append the section; where the test failed for another reason, it begins with the verdict."""
    if item.config.getoption("tbstyle", "auto") in ("line", "no"):
        return
    verdict = "" if evidence.explains_failure else f"{evidence.report!r}\n"
    if evidence.text:
        report.sections.append((f"modelhealth: {evidence.title}", verdict + evidence.text))
