"""The same tests where torchrun started pytest on each rank: they run where they are.

The ranks wait for each other before each test, and say there how the last one ended: what a group
does after one rank failed alone is anybody's guess, so such a run ends.
"""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.plugin.ranks import WANTED
from pytest_modelhealth.plugin.several_ranks import write_no_snapshots

MINUTE = 60.0  # how long a rank waits for the others, at a barrier and in the group it makes


class Torchrun:
    """The plugin of each process under torchrun, where there are tests on several ranks."""

    def __init__(self, config: pytest.Config) -> None:
        self._size, self._rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        self._store: Any = None
        self._barrier: Any = None
        self._test = self._outcome = ""
        self._stderr = os.dup(2)  # what is written there, no capture takes
        if self._rank:  # the first one shows and records
            reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
            if reporter is not None:
                reporter._tw._file = Path(os.devnull).open("w")  # noqa: SIM115 - until the end
            if hasattr(config.option, "disable_unused_snapshots"):
                config.option.disable_unused_snapshots = True
            write_no_snapshots(config)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip what is for another number of ranks; else wait for all."""
        wanted = item.stash.get(WANTED, None)
        if wanted is None:
            return
        if wanted.size != self._size:
            reason = f"is for {wanted.size} ranks, and WORLD_SIZE is {self._size}"
            raise pytest.skip.Exception(reason, _use_item_location=True)
        if self._barrier is None:
            self._join()
        self._wait_for_all(item.nodeid)
        self._test, self._outcome = item.nodeid, f", after {item.nodeid} passed"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a failure for the others, and say it at once, as rank 0 alone shows."""
        if report.failed and report.nodeid == self._test:
            self._outcome = f", after {report.nodeid} failed"
            if self._rank:
                head = f"\nFAILED {report.nodeid} on rank {self._rank} of {self._size}\n"
                os.write(self._stderr, f"{head}{report.longreprtext}\n".encode())

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Wait for all once more, as the last test may have failed on one alone."""
        if self._barrier is None or self._barrier.failed:
            return
        try:
            self._wait_for_all("the end of the run")
        except pytest.exit.Exception as error:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            os.write(self._stderr, f"\nmodelhealth: {error}\n".encode())

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Let rank 0 write its pages and files: torchrun ends it as soon as another has failed."""
        with contextlib.suppress(RuntimeError, AttributeError):  # it has no store
            if self._rank:
                self._store.wait(["written"], timedelta(seconds=MINUTE / 4))
            else:
                self._store.set("written", "")

    def _join(self) -> None:
        import torch
        import torch.distributed as dist
        import torch.distributed.distributed_c10d as c10d

        from pytest_modelhealth.ranks.barrier import Barrier

        if not (dist.is_available() and dist.is_initialized()):
            backend = None if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=MINUTE))
        self._store = c10d.PrefixStore("modelhealth", c10d._get_default_store())
        self._barrier = Barrier(self._store, range(self._size), self._rank, MINUTE)

    def _wait_for_all(self, name: str) -> None:
        """Wait until all ranks are about to run the same test, and ended the last one alike.

        Raises:
            pytest.exit.Exception: one does not come, runs another, or failed the last one alone.
        """
        try:
            self._barrier.wait(f"{name}{self._outcome}")
        except (InspectionError, RuntimeError) as error:
            failed = int(pytest.ExitCode.TESTS_FAILED)
            pytest.exit(f"{error}: the process group cannot be trusted any more", failed)
