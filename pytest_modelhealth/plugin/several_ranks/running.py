"""Takes a test over from pytest: its ranks run it, and this process reports the result.

It waits for them no longer than it has to.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.skipping import evaluate_skip_marks

from pytest_modelhealth.plugin.output_files import warn_once
from pytest_modelhealth.plugin.several_ranks import Wanted, snapshots, verdict
from pytest_modelhealth.plugin.several_ranks.processes import (
    KILL,
    Launcher,
    LaunchError,
    Rank,
    hear,
)
from pytest_modelhealth.plugin.several_ranks.verdict import Ran
from pytest_modelhealth.ranks import END_OF_TEST

GRACE = 5.0
"""Seconds that the others have once a rank failed alone: most end by themselves as its connection
closes, those that wait elsewhere would wait for ever."""

_ANSWER = 2.0
"""Seconds in which a rank says where it is, if its interpreter runs."""

_TICK = 0.05
_NUMBERS = itertools.count()
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
    skipped = verdict.made_here(item, "setup", lambda: _skip(item))
    if skipped:  # no rank is started for what its marks skip
        reports = [*skipped, *verdict.made_here(item, "teardown")]
    else:
        reports = _run(item, wanted, launcher)
    for report in reports:
        hook.pytest_runtest_logreport(report=report)
    # fixtures of earlier tests that the next one does not use
    end = item.session._setupstate.teardown_exact
    for report in verdict.made_here(item, "teardown", lambda: end(nextitem)):
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _skip(item: pytest.Item) -> None:
    skipped = evaluate_skip_marks(item)
    if skipped is not None:
        raise pytest.skip.Exception(skipped.reason, _use_item_location=True)


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
    verdict.warn(item, ran.ranks)
    snapshots.take_over(item, [one for rank in ran.ranks for one in rank.snapshots])
    for rank in ran.ranks:
        if rank.exit is not None:
            pytest.exit(f"rank {rank.number}: {rank.exit['text']}", rank.exit["code"])
    return reports


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


@contextlib.contextmanager
def run(item: pytest.Item, wanted: Wanted, launcher: Launcher) -> Iterator[Ran]:
    """Run a test on its ranks, of which none is left afterwards.

    The folder by which they find each other is there for as long as the context. It lies where
    pytest removes it in a later run, should this one be killed.

    Raises:
        LaunchError: they cannot be started.
    """
    is_worker = hasattr(item.config, "workerinput")
    watched = os.getppid() if is_worker and hasattr(os, "getppid") else None
    try:
        made = tempfile.mkdtemp(prefix="modelhealth-ranks-", dir=_temporary(item.config))
    except OSError as error:
        why = f"no rank can be started: no folder for temporary files: {error}"
        raise LaunchError(why) from None
    folder, number = Path(made), next(_NUMBERS)
    try:
        requests = [_request(item, wanted, n, folder, number) for n in range(wanted.size)]
        ranks = launcher.start(requests)
        begun = time.monotonic()
        try:
            ended = _wait(ranks, begun + wanted.seconds, watched)
            if ended:
                _ask(ranks)
        finally:
            for rank in ranks:
                if rank.code is None:
                    rank.end(KILL)
            for rank in ranks:
                rank.close()
        for rank in ranks:
            rank.log = _log(folder / f"log{rank.number}")
        yield Ran(ranks, wanted.seconds, time.monotonic() - begun, ended, folder, GRACE)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _temporary(config: pytest.Config) -> Path | None:
    """Return pytest's folder for temporary files; ``None`` under ``-p no:tmpdir``."""
    factory = getattr(config, "_tmp_path_factory", None)
    return None if factory is None else Path(factory.getbasetemp())


def _request(
    item: pytest.Item, wanted: Wanted, rank: int, folder: Path, number: int
) -> dict[str, Any]:
    config = item.config
    _, separator, inside = item.nodeid.partition("::")
    temporary = _temporary(config)
    return {
        "rank": rank,
        "size": wanted.size,
        "seconds": wanted.seconds,
        "folder": str(folder),
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
            END_OF_TEST: str(time.time() + wanted.seconds),
        },
        "basetemp": str(temporary / f"ranks{number}-{rank}") if temporary else None,
        "allure": str(folder / f"allure{rank}"),
        "log": None if prints(config) else str(folder / f"log{rank}"),
        "workerinput": _workerinput(config, rank, wanted.size),
    }


def prints(config: pytest.Config) -> bool:
    """Whether what tests print goes to the terminal as it comes (``-s``)."""
    return bool(config.getoption("capture", "fd") == "no")


def _workerinput(config: pytest.Config, rank: int, size: int) -> dict[str, Any]:
    """Return what tells plugins that another process reports, with what ours leave in it."""
    given: dict[str, Any] = {"workerid": "master", "testrunuid": "ranks", "mainargv": sys.argv}
    given |= getattr(config, "workerinput", {})
    given |= {"modelhealth_rank": rank, "modelhealth_size": size}
    collector = config.pluginmanager.get_plugin("modelhealth.collector")
    if collector is not None:
        collector.pytest_configure_node(SimpleNamespace(workerinput=given))
    if config.pluginmanager.hasplugin("_cov"):
        given.setdefault("cov_master_host", socket.gethostname())
        given.setdefault("cov_master_topdir", str(config.rootpath))
        given.setdefault("cov_master_rsync_roots", [])
    return given


def _wait(ranks: list[Rank], limit: float, watched: int | None) -> str:
    """Wait for all ranks; return why it was given up, if it was."""
    given_up = None
    while True:
        hear(ranks, _TICK)
        for rank in ranks:
            rank.look()
            rank.hear()  # its last words, before it counts as crashed
        if watched is not None and os.getppid() != watched:
            raise KeyboardInterrupt("xdist's controller is gone")
        if all(rank.code is not None for rank in ranks):
            return ""
        now = time.monotonic()
        if given_up is None and any(rank.failed and rank.code is not None for rank in ranks):
            given_up = now + GRACE
        if now > limit:
            return "limit"
        if given_up is not None and now > given_up:
            return "grace"


def _ask(ranks: list[Rank]) -> None:
    """Learn where the ranks are that have not ended."""
    running = [rank for rank in ranks if rank.code is None]
    for rank in running:
        rank.ask()
    end = time.monotonic() + _ANSWER
    while time.monotonic() < end and any(rank.where is None for rank in running):
        hear(running, _TICK)
    silent = [rank for rank in running if rank.where is None]
    for rank in silent:  # pytest has faulthandler write its stack to the log
        rank.end(signal.SIGABRT)
    if silent:
        hear(silent, 1.0)


_LONGEST_LOG = 20_000


def _log(path: Path) -> str:
    """Return what a rank printed, and what pytest had captured when it ended."""
    captured = sorted(path.parent.glob(f"{path.name}-captured*"))
    return "\n".join(filter(None, (_end_of(file) for file in (*captured, path))))


def _end_of(path: Path) -> str:
    try:
        text = path.read_bytes()
    except OSError:
        return ""
    return text[-_LONGEST_LOG:].decode("utf-8", "replace").strip("\n\0")
