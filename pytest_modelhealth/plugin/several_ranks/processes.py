"""The processes of ranks: forked from a server that has torch and pytest's plugins imported.

Where a system has no fork they are started one by one.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from pytest_modelhealth.plugin.several_ranks import rank_process

_BELOW_THE_TEST = re.compile(
    r"/_pytest/|/pluggy/|several_ranks|<string>|multiprocessing|_call_impl"
)
"""Lines of a stack that nobody looks for."""


def _context() -> Any:
    return multiprocessing.get_context("forkserver" if hasattr(os, "fork") else "spawn")


def start_server() -> None:
    """Start what ranks are forked from; it imports torch meanwhile."""
    if hasattr(os, "fork"):
        from multiprocessing import forkserver

        _context().set_forkserver_preload(["pytest_modelhealth.plugin.several_ranks.warm"])
        with _no_script():
            forkserver.ensure_running()


@contextlib.contextmanager
def _no_script() -> Iterator[None]:
    """Have multiprocessing not run the script that called pytest again in what starts inside."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


class Rank:
    """A process that runs one rank of one test, and what it said until it ended."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.number: int = request["rank"]
        self.code: int | None = None
        """Its exit code if it ended by itself; below zero the signal that ended it."""
        self.reports: list[dict[str, Any]] = []
        """One a phase, and more of subtests, as pytest serialises them."""
        self.warnings: list[list[Any]] = []
        self.problems: list[str] = []  # why it could not run the test
        self.ends: list[bool] = []  # empty until it came to its end
        self._log = Path(request["log"])
        context = _context()
        self._control, theirs = context.Pipe()
        self._process = context.Process(
            target=rank_process.run, args=(request, theirs), name=f"rank {self.number}"
        )
        try:
            with _no_script():
                self._process.start()
        finally:
            theirs.close()
        self.signs = [self._control, self._process.sentinel]
        """What becomes ready when it says something, or ends."""

    def look(self) -> None:
        """Take what it said since the last time; where it has ended, end what it left behind."""
        if self.code is None:
            self.code = self._process.exitcode
            if self.code is not None:
                self.kill()
        with contextlib.suppress(EOFError, OSError):
            while self._control.poll():
                name, content = json.loads(self._control.recv_bytes())
                getattr(self, name).append(content)

    @property
    def crashed(self) -> bool:
        """Whether it ended, and not at its end."""
        return self.code is not None and not self.ends

    @property
    def failure(self) -> dict[str, Any]:
        """Its first failed report; empty where there is none."""
        return next((report for report in self.reports if report["outcome"] == "failed"), {})

    def log(self) -> str:
        """Return the end of what it and its libraries printed outside of pytest's capture."""
        with contextlib.suppress(OSError):
            return self._log.read_bytes()[-20_000:].decode("utf-8", "replace").strip("\n\0")
        return ""

    def said(self) -> str:
        """Return what it printed, and its stack from the test on."""
        lines = [f"rank {self.number}:"]
        for line in self.log().splitlines():
            is_below = line.startswith('  File "') and _BELOW_THE_TEST.search(line)
            if not is_below and not line.startswith("Extension modules:"):
                lines.append(line)
        return "\n".join(lines)

    def write_stack(self) -> None:
        """Have it write to its log where it is."""
        with contextlib.suppress(AttributeError, ProcessLookupError):  # on Windows it cannot
            os.kill(self._process.pid, signal.SIGUSR1)

    def kill(self) -> None:
        """End it and what it started."""
        if not hasattr(os, "killpg"):
            self._process.kill()
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # it has no session yet, or has ended
            if self.code is None:
                self._process.kill()

    def close(self) -> None:
        """End it if it runs; wait until it has ended."""
        if self.code is None:
            self.kill()
        self._process.join(5)
        self._control.close()
