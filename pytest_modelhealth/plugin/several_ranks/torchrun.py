"""The same tests where torchrun started pytest on each rank: they run where they are.

One failure must neither spread nor hang the others: the ranks meet in the store before each test, a
rank that fails says so there, and those that still wait for it are ended after some seconds. What
a group does after a rank left it alone is anybody's guess, so such a run ends.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from pytest_modelhealth.plugin.several_ranks import Wanted, snapshots
from pytest_modelhealth.plugin.several_ranks.rank_process import require_gloo
from pytest_modelhealth.plugin.several_ranks.running import GRACE
from pytest_modelhealth.plugin.several_ranks.waiting import report_on

if TYPE_CHECKING:
    from collections.abc import Callable

MINUTE = 60.0
"""How long a rank waits for the others, in a meeting and in the group it makes."""
_TICK = 0.02
_LEFT = "left"
_WATCH = 0.3
_PATIENCE = 5.0
"""Seconds for a question to the store that is under way when the run ends."""


def plugin(
    config: pytest.Config, size: int, wanted: Callable[[pytest.Item], Wanted | None]
) -> object:
    """Return the plugin of each process under torchrun, where there are tests on several ranks.

    Args:
        config: pytest's.
        size: how many processes there are.
        wanted: gives what the mark of a test asks for; ``None`` for a test without one.
    """
    return _Torchrun(config, size, wanted)


class _Torchrun:
    def __init__(
        self, config: pytest.Config, size: int, wanted: Callable[[pytest.Item], Wanted | None]
    ) -> None:
        self._config, self._size, self._wanted = config, size, wanted
        self._rank = int(os.environ["RANK"])
        self._store: Any = None
        self._stderr = os.dup(2)  # what is written there, no capture takes
        self._tests = 0
        self._running = ""
        self._failure = ""
        self._told: list[str] = []
        self._is_interrupted = False
        self._is_over = threading.Event()
        self._watching: threading.Thread | None = None
        if self._rank:
            _write_little(config)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
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
        self._join()
        self._tests += 1
        self._meet(item.nodeid)
        self._running, self._failure = item.nodeid, ""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not (report.failed and self._running and not self._failure):
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        said = getattr(crash, "message", "") or report.longreprtext
        self._failure = said.strip().partition("\n")[0] or "failed"
        self._post("failed", f"{self._rank}: {self._failure}")
        # at once: torchrun ends the other processes as soon as one has ended
        if self._rank:
            self._say(f"\nFAILED {report.nodeid} on rank {self._rank} of {self._size}")
            self._say(report.longreprtext)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self) -> None:
        if self._running:
            self._running = ""
            self._post(f"done/{self._rank}", self._failure or "passed")

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Let those that wait for this rank know, and end without meeting them."""
        if self._store is None or not isinstance(excinfo.value, KeyboardInterrupt):
            return
        self._is_interrupted = True
        with contextlib.suppress(RuntimeError):  # the store may go at the same Ctrl-C
            self._store.set(_LEFT, f"rank {self._rank} was interrupted by Ctrl-C, and came no more")
            if self._running and not self._failure:
                self._failure = "interrupted by Ctrl-C"
                self._post("failed", f"{self._rank}: {self._failure}")
                self._say(f"\nrank {self._rank} of {self._size}: {self._running}: {self._failure}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._store is None or self._is_interrupted:
            return
        self._tests += 1
        with contextlib.suppress(pytest.exit.Exception):
            self._meet("the end of the run")
        if self._told:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._told:
            terminalreporter.write_line(f"modelhealth: {line}", red=True)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Let rank 0 write its pages and files: torchrun ends it as soon as another has failed."""
        if self._store is None:
            return
        with contextlib.suppress(Exception):  # the store went with the process that held it
            if self._rank:
                self._store.wait(["written"], timedelta(seconds=MINUTE))
            else:
                self._store.set("written", "")
        self._stop_watching()

    def _join(self) -> None:
        if self._store is not None:
            return
        import torch
        import torch.distributed as dist
        import torch.distributed.distributed_c10d as c10d

        if not (dist.is_available() and dist.is_initialized()):
            require_gloo()
            backend = None if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=MINUTE))
        self._store = c10d.PrefixStore("modelhealth", c10d._get_default_store())
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    def _stop_watching(self) -> None:
        """Have no thread in the store as the interpreter ends: torch would abort the process."""
        self._is_over.set()
        if self._watching is not None:
            self._watching.join(_PATIENCE)

    def _meet(self, name: str) -> None:
        """Wait until all ranks are about to run the same test.

        Raises:
            pytest.exit.Exception: one does not come, runs another, or failed the last one alone.
        """
        self._post(f"at/{self._rank}", name)
        keys = [f"{self._tests}/at/{rank}" for rank in range(self._size)]
        end = time.monotonic() + MINUTE
        while not self._store.check(keys):
            if self._store.check([_LEFT]):
                self._give_up(self._store.get(_LEFT).decode())
            if time.monotonic() > end:
                missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
                self._give_up(f"{_ranks(missing)} did not come to {name} within {MINUTE:g} s")
            time.sleep(_TICK)
        self._judge_last()
        names = {rank: self._store.get(key).decode() for rank, key in enumerate(keys)}
        for rank, other in names.items():
            if other != name:
                self._give_up(f"rank {rank} is at {other}, where rank {self._rank} is at {name}")

    def _judge_last(self) -> None:
        """End the run if a rank failed the last test alone."""
        last = self._tests - 1
        keys = [f"{last}/done/{rank}" for rank in range(self._size)]
        if not last or not self._store.check(keys):
            return
        outcomes = [self._store.get(key).decode() for key in keys]
        failed = [rank for rank, outcome in enumerate(outcomes) if outcome != "passed"]
        if failed and len(failed) < self._size:
            self._give_up(
                f"{_ranks(failed)} alone failed the last test ({outcomes[failed[0]]}): the process "
                "group cannot be trusted any more"
            )

    def _give_up(self, why: str) -> NoReturn:
        self._told.append(why)
        pytest.exit(why, returncode=int(pytest.ExitCode.TESTS_FAILED))

    def _post(self, key: str, text: str) -> None:
        self._store.set(f"{self._tests}/{key}", text)

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
        return "" if self._rank else text.getvalue()

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(self._stderr, f"{text}\n".encode("utf-8", "replace"))


def _another_client(store: Any) -> Any:
    """Return a client of its own: the main thread may hold the first one while it waits."""
    with contextlib.suppress(AttributeError, RuntimeError, NotImplementedError):
        return store.clone()
    return store


def _ranks(numbers: list[int]) -> str:
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


class HeldBack:
    """Holds back what a process but the first shows, until it is known what tests there are."""

    def __init__(self, config: pytest.Config) -> None:
        reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
        self._writer = None if reporter is None else reporter._tw
        self._text = io.StringIO()
        if self._writer is not None:
            self._file, self._writer._file = self._writer._file, self._text

    def show(self) -> None:
        """Show it after all: each process reports its own tests."""
        if self._writer is not None:
            self._writer._file = self._file
            self._file.write(self._text.getvalue())
            self._writer = None

    def forget(self) -> None:
        """Leave what is shown to rank 0; a failure is said on stderr."""
        self._writer = None


def _write_little(config: pytest.Config) -> None:
    """Leave snapshots to rank 0."""
    if hasattr(config.option, "disable_unused_snapshots"):
        config.option.disable_unused_snapshots = True
    snapshots.write_nothing(config)
