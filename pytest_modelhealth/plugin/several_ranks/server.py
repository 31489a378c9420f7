"""The warm process that ranks are forked from.

It has imported what a test on several ranks needs, and runs none of the user's code: what a fork
inherits is the same for each test. It has one thread and no CUDA context, as neither survives a
fork. It ends when the process that started it does, and takes its ranks along.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import traceback
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from typing import Any

_LOOK_UP = 0.5
"""Seconds between two looks at whether the parent is still there."""


def serve(descriptor: int, parent: int) -> None:
    """Fork ranks as asked for, until the other end is closed.

    Args:
        descriptor: of a socket to the parent.
        parent: its process id.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = Connection(descriptor)
    try:
        problem = _warm_up()
    except BaseException:  # noqa: BLE001 - the parent tells it
        problem = traceback.format_exc()
    with contextlib.suppress(OSError):
        connection.send(problem)
        if not problem:
            _Server(connection, parent).run()
    os._exit(0)


def _warm_up() -> str:
    """Import everything; return why nothing can be forked, or an empty text."""
    _load_plugins()  # first, as it rewrites asserts only of what is not imported yet
    if threads := _threads():
        return f"threads were started by what was imported: {threads}"
    _load_libraries()
    gc.collect()
    gc.freeze()  # else the first collection in each rank copies every page
    import torch

    if torch.cuda.is_initialized():
        return "CUDA was initialised by what was imported"
    threads = _threads()
    return f"threads were started by what was imported: {threads}" if threads else ""


def _load_libraries() -> None:
    """Import what a test on several ranks is likely to use, and what makes its reports."""
    import torch._dynamo  # which the first step of an optimizer imports
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.tensor.parallel
    import torch.nn.parallel  # noqa: F401

    import pytest_modelhealth.capture.engine
    import pytest_modelhealth.inspector
    import pytest_modelhealth.plugin.several_ranks.rank_process
    import pytest_modelhealth.rendering.failure  # noqa: F401


def _load_plugins() -> None:
    """Run pytest on an empty folder: that imports its plugins, with their asserts rewritten."""
    import pytest

    os.environ.pop("PYTEST_ADDOPTS", None)
    with tempfile.TemporaryDirectory() as folder:
        ini = Path(folder) / "pytest.ini"
        ini.write_text("[pytest]\n")
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            pytest.main(["-c", str(ini), "--rootdir", folder, "-p", "no:cacheprovider", folder])


def _threads() -> str:
    named = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
    tasks = Path("/proc/self/task")
    if not named and tasks.is_dir() and len(list(tasks.iterdir())) > 1:
        return "one in native code"
    return ", ".join(named)


class _Server:
    """Forks, and tells the parent which rank ended how."""

    def __init__(self, connection: Connection, parent: int) -> None:
        self._connection = connection
        self._parent = parent
        self._ranks: dict[int, tuple[int, int]] = {}
        self._woken, wakes = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(wakes, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)

    def run(self) -> None:
        try:
            while os.getppid() == self._parent:
                ready, _, _ = select.select(
                    [self._connection.fileno(), self._woken], [], [], _LOOK_UP
                )
                if self._woken in ready:
                    os.read(self._woken, 1024)
                self._tell_ended()
                if self._connection.fileno() in ready:
                    self._obey(self._connection.recv())
        except (EOFError, OSError):
            pass
        finally:
            self._kill(signal.SIGKILL)

    def _obey(self, message: dict[str, Any]) -> None:
        if message["do"] == "fork":
            for rank, request in enumerate(message["requests"]):
                self._fork(message["test"], rank, request, recv_handle(self._connection))
        else:
            self._kill(message["signal"], message["rank"])

    def _fork(self, test: int, rank: int, request: bytes, control: int) -> None:
        process = os.fork()
        if process:
            os.close(control)
            self._ranks[process] = (test, rank)
            return
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.setsid()  # Ctrl-C is the parent's, and what a rank starts ends with it
            os.close(self._woken)
            self._connection.close()
            from pytest_modelhealth.plugin.several_ranks.rank_process import run

            run(request, control)
        except BaseException:  # noqa: BLE001 - nothing of a child may come back to the server
            traceback.print_exc()
        finally:
            os._exit(70)

    def _kill(self, number: int, rank: int | None = None) -> None:
        for process, (_, which) in self._ranks.items():
            if rank is None or rank == which:
                self._end(process, number)

    @staticmethod
    def _end(process: int, number: int) -> None:
        for end in (os.killpg, os.kill):  # before it has a session, there is no such group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                end(process, number)

    def _tell_ended(self) -> None:
        for process, (test, rank) in list(self._ranks.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                del self._ranks[process]
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process, signal.SIGKILL)  # what it started and left behind
                code = os.waitstatus_to_exitcode(status)
                self._connection.send({"test": test, "rank": rank, "code": code})


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])).detach(), int(sys.argv[2]))
