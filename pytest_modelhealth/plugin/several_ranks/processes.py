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


class LaunchError(RuntimeError):
    """Ranks cannot be started; the text says why."""


class Rank:
    """A process that runs one rank of one test.

    Args:
        context: how it is started.
        request: what it runs.
        output: whether it writes to this process's standard output, and to no file.
    """

    code: int | None = None
    """Its exit code once it has ended; below zero the signal that ended it."""

    def __init__(self, context: Any, request: dict[str, Any], *, output: bool) -> None:
        self._control, theirs = context.Pipe()
        streams = [connection.Connection(os.dup(n)) for n in (1, 2)] if output else []
        self._process = context.Process(
            target=rank_process.run, args=(request, theirs, streams), name=f"rank {request['rank']}"
        )
        try:
            _start(self._process)
        finally:
            for stream in (theirs, *streams):
                stream.close()

    def news(self) -> Iterator[dict[str, Any]]:
        """Yield what it said since the last time; with that, note whether it has ended."""
        if self.code is None:
            self.code = self._process.exitcode
            if self.code is not None:
                self.end(getattr(signal, "SIGKILL", signal.SIGTERM))  # what it left behind
        with contextlib.suppress(EOFError, OSError):
            while self._control.poll():
                yield self._control.recv()

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

    def join(self) -> None:
        """Wait until it has ended, for some seconds."""
        self._process.join(5)

    def close(self) -> None:
        """Close what was open to it; a rank that still runs ends itself."""
        self._control.close()

    @property
    def waitables(self) -> list[Any]:
        """What becomes ready when it says something, or ends."""
        return [self._control, self._process.sentinel] if self.code is None else []


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
                rank.end(getattr(signal, "SIGKILL", signal.SIGTERM))
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


def wait(ranks: list[Rank], seconds: float) -> None:
    """Wait until a rank says something or ends, or so many seconds have passed."""
    connection.wait([one for rank in ranks for one in rank.waitables], seconds)


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
    changed = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
    }
    before = {name: os.environ.get(name) for name in changed}
    main = sys.modules["__main__"]
    os.environ.update(changed)
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
