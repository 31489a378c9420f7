"""A line in the summary for each waiver or threshold of the whole run that met no layer."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelhealth.plugin.inspections import INSPECTOR, left_on_reports
from pytest_modelhealth.plugin.options import session_settings

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from pytest_modelhealth.report import HealthReport
    from pytest_modelhealth.settings import LayerLimit, Settings
    from pytest_modelhealth.settings.setting import Waiver


_SELECTING = ("keyword", "markexpr", "deselect", "lf", "maxfail")
"""Options with which a run is only a part of the suite."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Put what met something on the test's report, which crosses from xdist's workers."""
    report = yield
    fixture = item.stash.get(INSPECTOR, None)
    if fixture is not None and call.when == "call":
        judged = [health for health in fixture.reports if health._judgements]
        if judged and _shared(session_settings(item.config)):
            met = {text for health in judged for text in _met(health)}
            report.modelhealth_met = [sorted(met)]  # type: ignore[attr-defined]
    return report


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Name what met nothing; what the ini file says only where the whole suite ran."""
    judged = left_on_reports(terminalreporter, "modelhealth_met")
    if not judged or config.get_verbosity() < 0:
        return
    # Under xdist the workers deselect, and the controller does not know.
    selected = any(config.getoption(name, None) for name in _SELECTING)
    is_part = config.args_source is pytest.Config.ArgsSource.ARGS
    whole = not (selected or is_part or terminalreporter.stats.get("deselected"))
    met = {text for texts in judged for text in texts}
    for text in _shared(session_settings(config)):
        if text not in met and (whole or text.startswith("--")):
            terminalreporter.write_line(f"modelhealth: {text}: nothing in this run needed it")


def _shared(settings: Settings) -> list[str]:
    """Return the waivers and limits of the whole run, as the summary names them."""
    return [
        *(_waiver(waiver) for waiver in settings.waivers if waiver.shared),
        *(_limit(limit) for limit in settings.layer_limits if limit.shared),
    ]


def _met(health: HealthReport) -> Iterator[str]:
    for judgement in health._judgements:
        yield from (_waiver(waiver) for _, waiver in judgement.waived)
    for limit in health._settings.layer_limits:
        if any(fnmatchcase(name, limit.layers) for name in health.observation.layers):
            yield _limit(limit)


def _waiver(waiver: Waiver) -> str:
    return f"{waiver.origin}: the waiver of {waiver}"


def _limit(limit: LayerLimit) -> str:
    return f"{limit.limit.origin}: {limit.setting}={limit.limit.value}"
