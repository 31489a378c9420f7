"""A warning for each waiver that waived nothing, so that none outlives what it was for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelhealth.errors import ModelHealthWarning
from pytest_modelhealth.plugin.inspections import INSPECTOR, InspectorFixture

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_modelhealth.settings import Waiver


# Outside the check of unread reports, whose judgements count too.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Warn where the body passed and its reports were judged."""
    result = yield
    fixture = item.stash.get(INSPECTOR, None)
    if fixture is not None:
        for waiver in _unused_waivers(fixture):
            _warn(item, _describe(waiver))
    return result


def _warn(item: pytest.Item, text: str) -> None:
    try:
        item.warn(ModelHealthWarning(text))
    except ModelHealthWarning:  # under -W error; its own traceback would lead through pytest
        is_error = True
    else:
        is_error = False
    if is_error:
        pytest.fail(text, pytrace=False)


def _unused_waivers(fixture: InspectorFixture) -> list[Waiver]:
    judgements = [judgement for report in fixture.reports for judgement in report.judgements]
    used = {waiver for judgement in judgements for _, waiver in judgement.waived}
    return [w for w in fixture.settings.waivers if judgements and w not in used]


def _describe(waiver: Waiver) -> str:
    check = f", check={waiver.check!r}" if waiver.check else ""
    return (
        f"{waiver.origin}: nothing is left to waive for ({waiver.layers!r}{check}); remove the "
        f"marker, or correct its layers if it was meant to match (its reason: {waiver.reason})"
    )
