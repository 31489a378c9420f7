"""Takes a test over from pytest: starts its ranks, waits for them, and reports the result."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.skipping import evaluate_skip_marks

from pytest_modelhealth.plugin.ranks import Wanted
from pytest_modelhealth.plugin.several_ranks import verdict
from pytest_modelhealth.plugin.several_ranks.processes import Rank, start_server

GRACE = 5.0
"""Seconds that the others have once a rank failed alone: most end by themselves as its connection
closes, those that wait elsewhere would wait for ever."""


def protocol(item: pytest.Item, nextitem: pytest.Item | None, wanted: Wanted) -> None:
    """Do for a test what pytest's own protocol does, but for running it in this process."""
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    skipped = verdict.made_here(item, "setup", lambda: _skip(item))
    # no rank is started for what its marks skip
    reports = [*skipped, *verdict.made_here(item, "teardown")] if skipped else _run(item, wanted)
    # fixtures of earlier tests that the next one does not use
    end = item.session._setupstate.teardown_exact
    reports += verdict.made_here(item, "teardown", lambda: end(nextitem))
    for report in reports:
        hook.pytest_runtest_logreport(report=report)
    _tell_allure(item, max(reports, key=lambda report: report.failed))
    syrupy = getattr(item.config, "_syrupy", None)
    if syrupy is not None:  # it would take the snapshots that the ranks compare for unused
        syrupy.ran_item(item.nodeid, "skipped")
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _tell_allure(item: pytest.Item, report: pytest.TestReport) -> None:
    """Have allure's result of a test, which it made in this process, be that of the ranks."""
    listener: Any = item.config.pluginmanager.get_plugin("allure_listener")
    if listener is not None:
        from allure_commons.model2 import StatusDetails

        result = listener.allure_logger.get_test(listener._cache.get(item.nodeid))
        result.status = report.outcome
        result.statusDetails = StatusDetails(trace=report.longreprtext or None)


def _skip(item: pytest.Item) -> None:
    skipped = evaluate_skip_marks(item)
    if skipped is not None:
        raise pytest.skip.Exception(skipped.reason, _use_item_location=True)


def _run(item: pytest.Item, wanted: Wanted) -> list[pytest.TestReport]:
    """Run a test on its ranks, of which none is left afterwards."""
    is_worker = hasattr(item.config, "workerinput")
    watched = os.getppid() if is_worker and hasattr(os, "getppid") else None
    ranks: list[Rank] = []
    try:
        start_server()
        ranks.extend(Rank(request) for request in _requests(item, wanted))
        _wait(ranks, wanted.seconds, watched)
        running = [rank for rank in ranks if rank.code is None]
        for rank in running:
            rank.write_stack()
        time.sleep(0.5 if running else 0.0)  # until it stands in their logs
    except (OSError, EOFError) as error:
        why = "no rank can be started: they are forked from a process that imports torch and "
        return [verdict.failed(item, "setup", f"{why}pytest's plugins: {error!r}")]
    finally:
        for rank in ranks:
            rank.close()
    verdict.warn(ranks)
    return verdict.reports(item, ranks, wanted.seconds)


def _requests(item: pytest.Item, wanted: Wanted) -> Iterator[dict[str, Any]]:
    config = item.config
    factory = getattr(config, "_tmp_path_factory", None)  # none under -p no:tmpdir
    folder = factory.mktemp("ranks") if factory else Path(tempfile.mkdtemp(prefix="ranks-"))
    _, separator, inside = item.nodeid.partition("::")
    for rank in range(wanted.size):
        yield {
            "rank": rank,
            "size": wanted.size,
            "seconds": wanted.seconds,
            "store": str(folder / "store"),
            "log": str(folder / f"log{rank}"),
            "basetemp": str(folder / f"tmp{rank}"),
            "nodeid": item.nodeid,
            "argument": f"{item.path}{separator}{inside}",
            "args": [str(argument) for argument in config.invocation_params.args],
            "cwd": str(config.invocation_params.dir),
            "warnoptions": sys.warnoptions,
            "environ": {
                "OMP_NUM_THREADS": "1",
                **os.environ,
                # what torchrun sets, but for an address to meet at
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(wanted.size),
                "LOCAL_WORLD_SIZE": str(wanted.size),
            },
            "prints": config.getoption("capture", "fd") == "no",
            "workerinput": _workerinput(config, rank),
        }


def _workerinput(config: pytest.Config, rank: int) -> dict[str, Any]:
    """Return what tells plugins that another process reports, with what ours leave in it."""
    given: dict[str, Any] = {"workerid": "master", "testrunuid": "ranks", "mainargv": sys.argv}
    given |= getattr(config, "workerinput", {})
    given |= {"modelhealth_rank": rank}
    collector = config.pluginmanager.get_plugin("modelhealth.collector")
    if collector is not None:
        collector.pytest_configure_node(SimpleNamespace(workerinput=given))
    if config.pluginmanager.hasplugin("_cov"):
        given.setdefault("cov_master_host", socket.gethostname())
        given.setdefault("cov_master_topdir", str(config.rootpath))
        given.setdefault("cov_master_rsync_roots", [])
    return given


def _wait(ranks: list[Rank], seconds: float, watched: int | None) -> None:
    """Wait until all ranks have ended, or no longer."""
    end = time.monotonic() + seconds
    while any(rank.code is None for rank in ranks) and time.monotonic() < end:
        connection.wait([one for rank in ranks if rank.code is None for one in rank.signs], 0.05)
        for rank in ranks:
            rank.look()
        if watched is not None and os.getppid() != watched:
            raise KeyboardInterrupt("xdist's controller is gone")
        if any(r.code is not None and (r.crashed or r.problems or r.failure) for r in ranks):
            end = min(end, time.monotonic() + GRACE)
