"""The same tests where torchrun started pytest on each rank: they run where they are.

One failure must neither spread nor hang the others: the ranks wait for each other before each test,
a rank that fails says so in the store, and those that still wait for it are ended after some
seconds. What a group does after a rank left it alone is anybody's guess, so such a run ends.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.plugin.several_ranks import Wanted, snapshots
from pytest_modelhealth.plugin.several_ranks.rank_process import require_gloo
from pytest_modelhealth.plugin.several_ranks.running import GRACE
from pytest_modelhealth.plugin.several_ranks.waiting import report_on

if TYPE_CHECKING:
    from pytest_modelhealth.ranks.barrier import Barrier

MINUTE = 60.0
"""How long a rank waits for the others, at a barrier and in the group it makes."""
_WATCH = 0.3
_LAST_QUESTION = 5.0
"""Seconds for a question to the store that is under way when the run ends."""


class Torchrun:
    """The plugin of each process under torchrun, where there are tests on several ranks.

    Args:
        config: pytest's.
        size: how many processes there are.
        wanted: gives what the mark of a test asks for; ``None`` for a test without one.
    """

    def __init__(
        self, config: pytest.Config, size: int, wanted: Callable[[pytest.Item], Wanted | None]
    ) -> None:
        self._config, self._size, self._wanted = config, size, wanted
        self._rank = int(os.environ["RANK"])
        self._store: Any = None
        self._barrier: Barrier | None = None
        self._stderr = os.dup(2)  # what is written there, no capture takes
        self._tests = 0
        self._running = ""
        self._failure = ""
        self._told = ""
        self._is_over = threading.Event()
        self._watching: threading.Thread | None = None
        if self._rank:  # snapshots are rank 0's
            if hasattr(config.option, "disable_unused_snapshots"):
                config.option.disable_unused_snapshots = True
            snapshots.write_nothing(config)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip or refuse what is for other numbers of ranks; else wait for all."""
        asked = self._wanted(item)
        if asked is None:
            return
        if asked.size > self._size:
            pytest.fail(
                f"needs {asked.size} ranks, and WORLD_SIZE is {self._size}: start "
                f"torchrun --nproc-per-node {asked.size} -m pytest, or run it by pytest alone, "
                "which starts the ranks itself",
                pytrace=False,
            )
        if asked.size < self._size:
            reason = f"is for {asked.size} of the ranks, and WORLD_SIZE is {self._size}"
            raise pytest.skip.Exception(reason, _use_item_location=True)
        self._wait_for_all(self._barrier or self._join(), item.nodeid)
        self._running, self._failure = item.nodeid, ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Let the others know of a failure."""
        if not (report.failed and self._running and not self._failure):
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        said = getattr(crash, "message", "") or report.longreprtext
        self._fail(said.strip().partition("\n")[0] or "failed")
        # at once: torchrun ends the other processes as soon as one has ended
        if self._rank:
            self._say(f"\nFAILED {report.nodeid} on rank {self._rank} of {self._size}")
            self._say(report.longreprtext)

    def _fail(self, why: str) -> None:
        self._failure = why
        self._store.set(f"{self._tests}/failed", f"{self._rank}: {why}")

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        """Let the others know how the test went."""
        if self._running:
            self._running = ""
            self._store.set(f"{self._tests}/done/{self._rank}", self._failure or "passed")

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Let those that wait for this rank know, and end without waiting for them."""
        if self._barrier is None or not isinstance(excinfo.value, KeyboardInterrupt):
            return
        self._barrier.fail(f"rank {self._rank} was interrupted by Ctrl-C, and came no more")
        self._barrier = None
        with contextlib.suppress(RuntimeError):  # the store may go at the same Ctrl-C
            if self._running and not self._failure:
                self._fail("interrupted by Ctrl-C")
                self._say(f"\nrank {self._rank} of {self._size}: {self._running}: {self._failure}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Wait for all once more, as the last test may have failed on one alone."""
        if self._barrier is not None and not self._told:
            with contextlib.suppress(pytest.exit.Exception):
                self._wait_for_all(self._barrier, "the end of the run")
        if self._told:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say why the run ended."""
        if self._told:
            terminalreporter.write_line(f"modelhealth: {self._told}", red=True)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Let rank 0 write its pages and files: torchrun ends it as soon as another has failed."""
        if self._watching is None:
            return
        with contextlib.suppress(Exception):  # the store went with the process that held it
            if self._rank:
                self._store.wait(["written"], timedelta(seconds=MINUTE))
            else:
                self._store.set("written", "")
        # with a thread in the store as the interpreter ends, torch would abort the process
        self._is_over.set()
        self._watching.join(_LAST_QUESTION)

    def _join(self) -> Barrier:
        import torch
        import torch.distributed as dist
        import torch.distributed.distributed_c10d as c10d

        from pytest_modelhealth.ranks.barrier import Barrier

        if not (dist.is_available() and dist.is_initialized()):
            require_gloo()
            backend = None if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=MINUTE))
        self._store = c10d.PrefixStore("modelhealth", c10d._get_default_store())
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()
        self._barrier = Barrier(self._store, range(self._size), self._rank, MINUTE, ("", ""))
        return self._barrier

    def _wait_for_all(self, barrier: Barrier, name: str) -> None:
        """Wait until all ranks are about to run the same test.

        Raises:
            pytest.exit.Exception: one does not come, runs another, or failed the last one alone.
        """
        try:
            barrier.wait(name)
        except InspectionError as error:
            self._told = str(error)
        keys = [f"{self._tests}/done/{rank}" for rank in range(self._size)]
        if self._tests and not self._told and self._store.check(keys):
            outcomes = [self._store.get(key).decode() for key in keys]
            failed = [rank for rank, outcome in enumerate(outcomes) if outcome != "passed"]
            if 0 < len(failed) < self._size:
                from pytest_modelhealth.report.ranks import named_ranks

                self._told = (
                    f"{named_ranks(failed)} alone failed the last test ({outcomes[failed[0]]}): "
                    "the process group cannot be trusted any more"
                )
        if self._told:
            pytest.exit(self._told, returncode=int(pytest.ExitCode.TESTS_FAILED))
        self._tests += 1

    def _watch(self) -> None:
        """End this process where it waits for a rank that failed."""
        store = _another_client(self._store)
        seen = 0.0
        while not self._is_over.wait(_WATCH):
            running, test = self._running, self._tests
            try:
                failed = bool(running) and store.check([f"{test}/failed"])
            except Exception:  # noqa: BLE001 - the store went with the process that held it
                return
            if not failed or self._failure:
                seen = 0.0
                continue
            seen = seen or time.monotonic()
            if time.monotonic() - seen > GRACE and running == self._running:
                first = store.get(f"{test}/failed").decode()
                where = report_on(threading.main_thread())["where"]
                self._say(
                    f"\nrank {self._rank} of {self._size}: {running}: still "
                    f"{where} {GRACE:g} s after rank {first}\n"
                    "The run ends: the process group cannot be trusted any more."
                )
                if not self._rank:
                    self._say(self._failures_so_far())
                os._exit(1)

    def _failures_so_far(self) -> str:
        """Return what pytest would show at its end of the tests before this one."""
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        text = io.StringIO()
        with contextlib.suppress(Exception):  # a run without its summary still has to end
            reporter._tw._file = text
            reporter.summary_failures()
            reporter.short_test_summary()
        return text.getvalue()

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._stderr, f"{text}\n".encode("utf-8", "replace"))


def _another_client(store: Any) -> Any:
    """Return a client of its own: the main thread may hold the first one while it waits."""
    with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
        return store.clone()
    return store
