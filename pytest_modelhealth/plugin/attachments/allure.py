"""Text, figures and data in Allure's results, where allure-pytest is installed and asked for."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from pytest_modelhealth.plugin.attachments import Evidence, told_at_end


def pytest_modelhealth_attach(item: pytest.Item, evidence: Evidence) -> None:
    """Attach what failed and what it is seen by."""
    if not _is_wanted(item.config):
        return
    import allure

    kinds = allure.attachment_type
    allure.attach(evidence.failure_text, "model health", kinds.TEXT)
    if evidence.text:
        allure.attach(evidence.text, evidence.title, kinds.TEXT)
    for name, png in evidence.figures.items():
        allure.attach(png, name.replace("_", " "), kinds.PNG)
    allure.attach(evidence.json, "report.json", kinds.JSON)


# Outside of what attaches the evidence.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Label the test with verdict, culprit and check.

    Labels, not parameters: these tell one test from another in Allure's history.
    """
    report = yield
    if _is_wanted(item.config):
        import allure

        for name, value in (told_at_end(item, report) or {}).items():
            allure.dynamic.label(name, value)  # type: ignore[no-untyped-call]
    return report


def _is_wanted(config: pytest.Config) -> bool:
    return config.pluginmanager.hasplugin("allure_listener")
