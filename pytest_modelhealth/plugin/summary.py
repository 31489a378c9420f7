"""One line in the terminal summary for each test whose verdict is inconclusive; -q hides them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelhealth.plugin.inspections import INSPECTOR

if TYPE_CHECKING:
    from collections.abc import Generator

    from pytest_modelhealth.report import HealthReport

_SHOWN = 3


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put what is missing on the test's report, as plain text that crosses from xdist's workers."""
    report = yield
    fixture = item.stash.get(INSPECTOR, None)
    if fixture is not None and call.when == "call":
        missing = [text for health in fixture.reports for text in _missing_evidence(health)]
        if missing:
            report.modelhealth_inconclusive = missing[0]  # type: ignore[attr-defined]
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say which verdicts are inconclusive, and what they need; -v lists all of them."""
    if config.get_verbosity() < 0:
        return
    told = dict.fromkeys(  # a subtest's report has what its test's has
        f"modelhealth: inconclusive: {report.nodeid}: {report.modelhealth_inconclusive}"
        for reports in terminalreporter.stats.values()
        for report in reports
        if hasattr(report, "modelhealth_inconclusive")
    )
    lines = list(told)
    shown = len(lines) if config.get_verbosity() > 0 else _SHOWN
    for line in lines[:shown]:
        terminalreporter.write_line(line)
    if lines[shown:]:
        terminalreporter.write_line(
            f"modelhealth: inconclusive: {len(lines) - shown} more tests (-v lists them)"
        )


def _missing_evidence(health: HealthReport) -> list[str]:
    """Return a sentence where the latest judgement was inconclusive; judge nothing anew."""
    latest = health.judgements[-1] if health.judgements else None
    # Without missing evidence a check is broken, which fails the test.
    if latest is None or latest.verdict != "inconclusive" or not latest.inconclusive:
        return []
    first, *others = latest.inconclusive
    more = f" (and {len(others)} more)" if others else ""
    return [f"{first.layer} ({first.check}): {first.reason}{more}"]
