"""Takes a test over from pytest: its ranks run it, and this process reports the result."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.skipping import evaluate_skip_marks

from pytest_modelhealth.plugin.folders import warn_once
from pytest_modelhealth.plugin.several_ranks import snapshots, verdict
from pytest_modelhealth.plugin.several_ranks.processes import LaunchError
from pytest_modelhealth.plugin.several_ranks.running import Ran, run

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_modelhealth.plugin.ranks import Wanted
    from pytest_modelhealth.plugin.several_ranks.processes import Launcher


_ENDS_THE_RUN = (KeyboardInterrupt, pytest.exit.Exception)
_WARNED = pytest.StashKey[bool]()
_SLOW = (
    "tests on several ranks start slowly: each rank imports torch anew, as none can be forked from "
    "a process that has: {}"
)


def protocol(
    item: pytest.Item,
    nextitem: pytest.Item | None,
    wanted: Wanted,
    launcher: Callable[[], Launcher],
) -> None:
    """Do for a test what pytest's own protocol does, but for running it in this process.

    Args:
        item: the test.
        nextitem: the one after it, for which fixtures of earlier tests may stay.
        wanted: what its mark asks for.
        launcher: gives what starts ranks, once it is needed.
    """
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _skipped(item) or _run(item, wanted, launcher):
        hook.pytest_runtest_logreport(report=report)
    for report in _torn_down(item, nextitem):
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _skipped(item: pytest.Item) -> list[pytest.TestReport]:
    """Return the reports of a test that its marks skip: no rank is started for it."""

    def evaluate() -> None:
        skipped = evaluate_skip_marks(item)
        if skipped is not None:
            raise pytest.skip.Exception(skipped.reason, _use_item_location=True)

    call = pytest.CallInfo.from_call(evaluate, when="setup", reraise=_ENDS_THE_RUN)
    if call.excinfo is None:
        return []
    after = pytest.CallInfo.from_call(lambda: None, when="teardown")
    make = item.ihook.pytest_runtest_makereport
    return [make(item=item, call=call), make(item=item, call=after)]


def _run(
    item: pytest.Item, wanted: Wanted, launcher: Callable[[], Launcher]
) -> list[pytest.TestReport]:
    starts = launcher()
    try:
        with run(item, wanted, starts) as ran:
            reports = verdict.reports(item, ran)
            _take_over_files(item, ran, reports)
    except LaunchError as error:
        return [verdict.failed(item, "setup", str(error))]
    if starts.problem and hasattr(os, "fork"):
        warn_once(item, _WARNED, _SLOW.format(starts.problem))
    verdict.warn(item, ran.told)
    snapshots.take_over(item, [one for told in ran.told for one in told.used])
    for told in ran.told:
        if told.exit is not None:
            pytest.exit(f"rank {told.rank}: {told.exit['text']}", told.exit["code"])
    return reports


def _torn_down(item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
    """End the fixtures of earlier tests that the next one does not use."""
    state = item.session._setupstate
    call = pytest.CallInfo.from_call(
        lambda: state.teardown_exact(nextitem), when="teardown", reraise=_ENDS_THE_RUN
    )
    if call.excinfo is None:
        return []
    return [item.ihook.pytest_runtest_makereport(item=item, call=call)]


def _take_over_files(item: pytest.Item, ran: Ran, reports: list[pytest.TestReport]) -> None:
    """Have allure's results be those of the rank that is reported."""
    listener: Any = item.config.pluginmanager.get_plugin("allure_listener")
    directory = item.config.getoption("allure_report_dir", None)
    lead = next((getattr(r, "modelhealth_rank", None) for r in reports[::-1]), None)
    if listener is None or directory is None or lead is None:
        return
    files = list((ran.folder / f"allure{lead}").glob("*"))
    if not files:
        return
    with contextlib.suppress(AttributeError):  # what this process scheduled for the test
        listener.allure_logger.drop_test(listener._cache.pop(item.nodeid))
    for file in files:
        shutil.copy(file, Path(directory))
