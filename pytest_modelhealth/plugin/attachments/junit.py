"""Verdict, culprit and check as properties of each test in JUnit XML (``--junitxml=PATH``)."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import Any

import pytest

from pytest_modelhealth.errors import InspectionError, SettingsError
from pytest_modelhealth.plugin.attachments import EVIDENCE, Evidence
from pytest_modelhealth.plugin.inspections import INSPECTOR
from pytest_modelhealth.plugin.snapshots import SNAPSHOT_CHECKS

_PROPERTIES = pytest.StashKey[dict[str, str]]()
_GRAVEST_FIRST = ("unhealthy", "different", "drifted", "missing", "inconclusive")


# Outside of what attaches the evidence.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the properties to the report of teardown, which pytest writes them from."""
    report = yield
    evidence, phase = item.stash.get(EVIDENCE, (None, "call"))
    if report.when in ("call", phase):  # later the fixture is gone
        results = [*_results(item)] if evidence is None else [_properties(evidence)]
        order = {verdict: rank for rank, verdict in enumerate(_GRAVEST_FIRST)}
        results.sort(key=lambda one: order.get(one["verdict"], len(order)))
        item.stash[_PROPERTIES] = {k: v for one in results[:1] for k, v in one.items() if v}
    if call.when == "teardown" and _PROPERTIES in item.stash:
        report.user_properties = [*item.user_properties, *item.stash[_PROPERTIES].items()]
        del item.stash[_PROPERTIES]
    return report


def _results(item: pytest.Item) -> Iterator[dict[str, str]]:
    """Yield what is to be said of all that a test made."""
    fixture = item.stash.get(INSPECTOR, None)
    for made in fixture.made if fixture is not None else ():
        with suppress(InspectionError, SettingsError):  # not judged, as the test says where it asks
            yield _properties(Evidence(made.report, explains_failure=False))
    from pytest_modelhealth.rendering.notation import printable

    for check, *_ in item.stash.get(SNAPSHOT_CHECKS, []):
        if (verdict := str(check.outcome.value)) in _GRAVEST_FIRST:
            drifts = check.found.drifts if check.found is not None else ()
            culprit = drifts[0].layer or check.now.observation.model_type if drifts else ""
            yield {"verdict": verdict, "culprit": printable(culprit), "check": "drift"}


def _properties(evidence: Evidence) -> dict[str, str]:
    return {name: getattr(evidence, name) for name in ("verdict", "culprit", "check")}
