"""Text, figures and data in Allure's results, where allure-pytest is installed and asked for."""

from __future__ import annotations

import pytest

from pytest_modelhealth.plugin.attachments import Evidence


def pytest_modelhealth_attach(item: pytest.Item, evidence: Evidence) -> None:
    """Attach what failed and what it is seen by."""
    import allure

    kinds = allure.attachment_type
    allure.attach(evidence.failure_text, "model health", kinds.TEXT)
    if evidence.text:
        allure.attach(evidence.text, evidence.title, kinds.TEXT)
    for name, png in evidence.figures.items():
        allure.attach(png, name.replace("_", " "), kinds.PNG)
    allure.attach(evidence.json, "report.json", kinds.JSON)
