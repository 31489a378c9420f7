"""Warnings at the end of a test: what only warns, and waivers that waived nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelhealth.plugin.inspections import INSPECTOR, InspectorFixture, warn

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_modelhealth.settings.waiver import Waiver


# Outside the check of reports, whose judgements count too.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Warn where the body passed and its reports were judged."""
    result = yield
    fixture = item.stash.get(INSPECTOR, None)
    if fixture is not None:
        for report in fixture.reports:
            for text in report._take_warnings():
                warn(item, text)
        for waiver in _unused_waivers(fixture):
            warn(item, _describe(waiver))
    return result


def _unused_waivers(fixture: InspectorFixture) -> list[Waiver]:
    """Return the waivers of this test and its calls that no judgement needed.

    Those of the ini file and the command line are for all tests together.
    """
    judgements = [judgement for report in fixture.reports for judgement in report._judgements]
    used = {waiver for judgement in judgements for _, waiver in judgement.waived}
    idle = [waiver for judgement in judgements for waiver in judgement.unused_waivers]
    return [w for w in dict.fromkeys(idle) if w not in used and not w.shared]


def _describe(waiver: Waiver) -> str:
    return (
        f"{waiver.origin}: nothing is left to waive for ({waiver}); remove it, or correct its "
        f"layers if it was meant to match (its reason: {waiver.reason})"
    )
