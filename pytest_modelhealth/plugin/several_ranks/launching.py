"""Starts and ends ranks: forked from a warm server, or each a process started by itself."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from typing import IO, Any, Protocol

_START_UP = 180.0
"""Seconds in which the server has imported torch, on a machine that does much else."""

_LONGEST_ERROR = 4000
_START = "import sys; sys.path[:] = {path!r}; from {module} import {name}; {name}({arguments})"
_FOLDER = "pytest_modelhealth.plugin.several_ranks"


class LaunchError(RuntimeError):
    """Ranks cannot be started; the text says why."""


class Rank(Protocol):
    """A process that runs one rank of one test."""

    code: int | None
    """Its exit code once it has ended; below zero the signal that ended it."""

    def ask(self) -> None:
        """Have it write down where it is."""

    def end(self, number: int) -> None:
        """Send it a signal."""

    def close(self) -> None:
        """Close what was open to it; a rank that still runs ends itself."""


class Launcher(Protocol):
    """Starts ranks."""

    problem: str
    """Why ranks are not forked from a warm process, but start slowly; empty where they are."""

    def start(self, requests: list[dict[str, Any]]) -> list[Rank]:
        """Start a process for each of the requests, in order of ranks.

        Raises:
            LaunchError: they cannot be started.
        """

    def poll(self, seconds: float) -> None:
        """Wait until a rank ended or so many seconds have passed, and note how it ended.

        Raises:
            LaunchError: what starts ranks is gone.
        """

    def close(self) -> None:
        """End everything."""


def launcher(*, output: bool) -> Launcher:
    """Return what starts ranks on this system, where Windows has no fork.

    Args:
        output: whether ranks write to this process's standard output.
    """
    return _Warm(output=output) if hasattr(os, "fork") else _Spawning(output=output)


class _Warm:
    """Forks ranks from a server that is started in the background; `_Spawning` if it is unfit."""

    def __init__(self, *, output: bool) -> None:
        self._output = output
        self._server: _Server | None = _Server(output=output)
        self._spawning: _Spawning | None = None
        self.problem = ""

    def start(self, requests: list[dict[str, Any]]) -> list[Rank]:
        if self._server is not None and self._server.lost:
            self._server.close()
            self._server = _Server(output=self._output)
        if self._server is not None and self._spawning is None:
            self.problem = self._server.wait_until_warm()
            if self.problem:
                self._server.close()
                self._server, self._spawning = None, _Spawning(output=self._output)
        return (self._spawning or self._server).start(requests)  # type: ignore[union-attr]

    def poll(self, seconds: float) -> None:
        (self._spawning or self._server).poll(seconds)  # type: ignore[union-attr]

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


class _Server:
    """This end of the server."""

    def __init__(self, *, output: bool) -> None:
        self.lost = False
        self._warm = False
        self._test = 0
        self._ranks: list[_Forked] = []
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the server
        files = _standard_files(output=output)
        if not output:
            files["stderr"] = self._errors
        ours, theirs = socket.socketpair()
        with theirs:
            code = _START.format(
                path=sys.path,
                module=f"{_FOLDER}.server",
                name="serve",
                arguments=f"{theirs.fileno()}, {os.getpid()}",
            )
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=[theirs.fileno()],
                env=_single_threaded(),
                start_new_session=True,
                **files,
            )
        self._connection = Connection(ours.detach())

    def wait_until_warm(self) -> str:
        """Return why it is unfit, or an empty text.

        Raises:
            LaunchError: it ended, or took too long.
        """
        if self._warm:
            return ""
        try:
            if not self._connection.poll(_START_UP):
                raise LaunchError(
                    f"no rank can be started: torch took over {_START_UP:.0f} s to load"
                )
            problem: str = self._connection.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            self.lost = True
            raise LaunchError(
                "no rank can be started: the process that they are forked from ended with exit "
                f"code {code} while it imported torch and pytest's plugins{self._last_words()}"
            ) from None
        self._warm = not problem
        return problem

    def _last_words(self) -> str:
        self._errors.seek(0)
        text = self._errors.read().decode("utf-8", "replace").strip()
        return f"\n\nit said:\n{text[-_LONGEST_ERROR:]}" if text else ""

    def start(self, requests: list[dict[str, Any]]) -> list[Rank]:
        self._test += 1
        self._ranks = []
        try:
            packed = [pickle.dumps(request) for request in requests]
            self._connection.send({"do": "fork", "test": self._test, "requests": packed})
            for rank in range(len(requests)):
                self._ranks.append(self._forked(rank))
        except OSError as error:
            self._lose(error)
        return list(self._ranks)

    def _forked(self, rank: int) -> _Forked:
        from multiprocessing.reduction import send_handle

        theirs, ours = os.pipe()
        try:
            send_handle(self._connection, theirs, self._process.pid)
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return _Forked(self, rank, ours)

    def poll(self, seconds: float) -> None:
        try:
            while self._connection.poll(seconds):
                ended = self._connection.recv()
                if ended["test"] == self._test:
                    self._ranks[ended["rank"]].code = ended["code"]
                seconds = 0.0
        except (EOFError, OSError) as error:
            self._lose(error)

    def send_signal(self, rank: int, number: int) -> None:
        with contextlib.suppress(OSError):
            self._connection.send({"do": "signal", "rank": rank, "signal": number})

    def close(self) -> None:
        self._errors.close()
        self._connection.close()  # it ends its ranks and itself
        if not self._warm:  # ... once it has imported everything
            self._process.kill()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _lose(self, error: Exception) -> None:
        self.lost = True
        raise LaunchError(f"the process that ranks are forked from is gone: {error!r}") from None


class _Forked:
    def __init__(self, server: _Server, rank: int, control: int) -> None:
        self.code: int | None = None
        self._server, self._rank, self._control = server, rank, control

    def ask(self) -> None:
        with contextlib.suppress(OSError):
            os.write(self._control, b"?")

    def end(self, number: int) -> None:
        self._server.send_signal(self._rank, number)

    def close(self) -> None:
        if self._control >= 0:
            os.close(self._control)
            self._control = -1


class _Spawning:
    """Starts each rank as a process of its own, which imports everything anew: on Windows."""

    def __init__(self, *, output: bool) -> None:
        self.problem = "this system has no fork"
        self._output = output
        self._ranks: list[_Spawned] = []

    def start(self, requests: list[dict[str, Any]]) -> list[Rank]:
        self._ranks = []
        try:
            for request in requests:
                self._ranks.append(_Spawned(pickle.dumps(request), output=self._output))
        except OSError as error:
            self.close()
            raise LaunchError(f"no rank can be started: {error}") from None
        return list(self._ranks)

    def poll(self, seconds: float) -> None:
        before = [rank.code for rank in self._ranks]
        end = time.monotonic() + seconds
        while [rank.look() for rank in self._ranks] == before and time.monotonic() < end:
            time.sleep(0.02)

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


class _Spawned:
    def __init__(self, request: bytes, *, output: bool) -> None:
        self.code: int | None = None
        code = _START.format(
            path=sys.path, module=f"{_FOLDER}.rank_process", name="run_spawned", arguments=""
        )
        options = _standard_files(output=output) | {"stdin": subprocess.PIPE}
        options["start_new_session"] = hasattr(os, "setsid")
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], env=_single_threaded(), **options
        )
        self._control: IO[Any] = self._process.stdin  # type: ignore[assignment]
        self._control.write(len(request).to_bytes(8, "little") + request)
        self._control.flush()

    def look(self) -> int | None:
        self.code = self._process.poll()
        return self.code

    def ask(self) -> None:
        with contextlib.suppress(OSError):
            self._control.write(b"?")
            self._control.flush()

    def end(self, number: int) -> None:
        with contextlib.suppress(OSError):
            if number == getattr(signal, "SIGKILL", None) and hasattr(os, "killpg"):
                os.killpg(self._process.pid, number)
            elif hasattr(os, "killpg"):
                self._process.send_signal(number)
            else:
                self._process.kill()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._control.close()


def _single_threaded() -> dict[str, str]:
    """Return the environment, under which importing numpy starts no thread, as under torchrun."""
    return {"OMP_NUM_THREADS": "1", **os.environ, "OPENBLAS_NUM_THREADS": "1"}


def _standard_files(*, output: bool) -> dict[str, Any]:
    """Return those of a process that writes here, or nowhere: this process may capture its own."""
    nowhere = None if output else subprocess.DEVNULL
    return {"stdin": subprocess.DEVNULL, "stdout": nowhere, "stderr": nowhere}
