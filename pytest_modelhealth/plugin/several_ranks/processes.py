"""Starts and ends the processes of ranks: forked from a warm server, or each started by itself."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from multiprocessing import connection
from pathlib import Path
from types import ModuleType
from typing import Any

from pytest_modelhealth.plugin.several_ranks import rank_process

_WARM = "pytest_modelhealth.plugin.several_ranks.warm"
KILL = getattr(signal, "SIGKILL", signal.SIGTERM)


class LaunchError(RuntimeError):
    """Ranks cannot be started; the text says why."""


class Rank:
    """A process that runs one rank of one test, and what it said until it ended.

    Args:
        context: how it is started.
        request: what it runs.
        output: whether it writes to this process's standard output, and to no file.
    """

    def __init__(self, context: Any, request: dict[str, Any], *, output: bool) -> None:
        self.number: int = request["rank"]
        self.code: int | None = None
        """Its exit code if it ended by itself; below zero the signal that ended it."""
        self.finished = False
        """Whether it came to its end."""
        self.reports: list[dict[str, Any]] = []
        """One a phase, and more of subtests, as pytest serialises them."""
        self.warnings: list[dict[str, Any]] = []
        self.problems: list[str] = []
        """Why it could not run the test."""
        self.snapshots: list[dict[str, Any]] = []
        self.exit: dict[str, Any] | None = None
        """What ``pytest.exit`` was called with."""
        self.where: dict[str, str] | None = None
        """What it did when it was asked: ``"where"`` and ``"stack"``."""
        self.log = ""
        """What it and its libraries printed outside of pytest's capture."""
        self._control, theirs = context.Pipe()
        streams = [connection.Connection(os.dup(n)) for n in (1, 2)] if output else []
        self._process = context.Process(
            target=rank_process.run, args=(request, theirs, streams), name=f"rank {self.number}"
        )
        try:
            _start(self._process)
        finally:
            for stream in (theirs, *streams):
                stream.close()
        self.signs = [self._control, self._process.sentinel]
        """What becomes ready when it says something, or ends."""

    def hear(self) -> None:
        """Take what it said since the last time."""
        with contextlib.suppress(EOFError, OSError):
            while self._control.poll():
                name, content = self._control.recv()
                held = getattr(self, name)
                if isinstance(held, list):
                    held.append(content)
                else:
                    setattr(self, name, content)

    def look(self) -> None:
        """Note whether it has ended, and end what it left behind."""
        if self.code is None:
            self.code = self._process.exitcode
            if self.code is not None:
                self.end(KILL)

    @property
    def failed(self) -> bool:
        """Whether something went wrong on it so far."""
        crashed = self.code is not None and not self.finished
        return crashed or bool(self.problems) or bool(self.failure)

    @property
    def failure(self) -> dict[str, Any]:
        """Its first failed report; empty where there is none."""
        return next((report for report in self.reports if report["outcome"] == "failed"), {})

    def of_phase(self, phase: str) -> list[dict[str, Any]]:
        """Return its reports of a phase."""
        return [report for report in self.reports if report["when"] == phase]

    def ask(self) -> None:
        """Have it say where it is."""
        with contextlib.suppress(OSError):
            self._control.send("where")

    def end(self, number: int) -> None:
        """Send a signal to it and to what it started."""
        if not hasattr(os, "killpg"):
            self._process.kill()
            return
        try:
            os.killpg(self._process.pid, number)
        except (ProcessLookupError, PermissionError):  # it has no session yet, or has ended
            if self.code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._process.pid, number)

    def close(self) -> None:
        """Wait some seconds until it has ended, and take its last words."""
        self._process.join(5)
        self.hear()
        self._control.close()


def hear(ranks: list[Rank], seconds: float) -> None:
    """Take what ranks say after so many seconds at most."""
    running = [rank for rank in ranks if rank.code is None]
    connection.wait([one for rank in running for one in rank.signs], seconds)
    for rank in ranks:
        rank.hear()


class Launcher:
    """Starts ranks. What they are forked from is started at once, and imports torch meanwhile.

    Args:
        output: whether ranks write to this process's standard output.
    """

    problem = ""
    """Why ranks are not forked from a warm process, but start slowly; empty where they are."""

    def __init__(self, *, output: bool) -> None:
        self._output = output
        self._context: Any = None
        if hasattr(os, "fork"):
            from multiprocessing import forkserver

            multiprocessing.get_context("forkserver").set_forkserver_preload([_WARM])
            with _surroundings():
                forkserver.ensure_running()

    def start(self, requests: list[dict[str, Any]]) -> list[Rank]:
        """Start a process for each of the requests, in order of ranks.

        Raises:
            LaunchError: they cannot be started.
        """
        ranks: list[Rank] = []
        try:
            context = self._context = self._context or self._chosen()
            output = self._output and hasattr(os, "fork")
            ranks.extend(Rank(context, request, output=output) for request in requests)
        except (OSError, EOFError) as error:
            for rank in ranks:
                rank.end(KILL)
            raise LaunchError(
                "no rank can be started: the process that they are forked from, which imports "
                f"torch and pytest's plugins, ended: {type(error).__name__}: {error}"
            ) from None
        return ranks

    def _chosen(self) -> Any:
        """Return how processes are started: as Windows does, where the server is unfit."""
        self.problem = "this system has no fork"
        if hasattr(os, "fork"):
            context = multiprocessing.get_context("forkserver")
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_tell_problem, args=(theirs,))
            _start(process)
            theirs.close()
            self.problem = ours.recv()
            process.join()
        return multiprocessing.get_context("spawn") if self.problem else context


def _tell_problem(answer: Any) -> None:
    """Say what is wrong with the server, in a fork of it."""
    answer.send(getattr(sys.modules.get(_WARM), "PROBLEM", ""))


def _start(process: Any) -> None:
    with _surroundings():
        process.start()


@contextlib.contextmanager
def _surroundings() -> Iterator[None]:
    """Have processes that start inside find the same modules, with one thread for numpy as well.

    multiprocessing would run the script that called pytest again in each: there is none for it.
    """
    before, main = dict(os.environ), sys.modules["__main__"]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        os.environ.clear()
        os.environ.update(before)
