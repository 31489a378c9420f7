"""What a rank does: it runs pytest with one test, and ends when nobody waits for it."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import random
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pytest_modelhealth.plugin.several_ranks.reporting import Said, plugin
from pytest_modelhealth.plugin.several_ranks.waiting import report_on

if TYPE_CHECKING:
    import pytest


def run_spawned() -> None:
    """Run the rank whose request comes through standard input."""
    size = int.from_bytes(_exactly(0, 8), "little")
    packed = _exactly(0, size)
    control = os.dup(0)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    run(packed, control)


def _exactly(descriptor: int, size: int) -> bytes:
    read = b""
    while len(read) < size:
        more = os.read(descriptor, size - len(read))
        if not more:
            os._exit(70)
        read += more
    return read


def run(packed: bytes, control: int) -> NoReturn:
    """Run one test, and end this process.

    Args:
        packed: the pickled request, as `running` makes it.
        control: what only the parent writes to: a byte asks where this rank is, the end of the
            file is that of the parent.
    """
    request = pickle.loads(packed)
    folder, rank = Path(request["folder"]), request["rank"]
    said = Said(folder / f"said{rank}")
    try:
        _become(request, folder)
        threading.Thread(target=_watch, args=(control, folder, rank), daemon=True).start()
        _run_pytest(request, said)
    except BaseException as error:  # noqa: BLE001 - the parent tells it
        text = str(error) if type(error).__name__ == "UsageError" else traceback.format_exc()
        said.say("problem", text=text)
    said.say("end")
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            file.flush()
    # No process group is destroyed: that waits for ranks that may be dead.
    os._exit(0)


def _become(request: dict[str, Any], folder: Path) -> None:
    """Take over what a process started by pytest itself would have."""
    if request["log"]:
        log = os.open(folder / f"log{request['rank']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        _keep_captured(folder / f"log{request['rank']}")
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
    sys.path[:] = request["path"]
    sys.argv[:] = request["argv"]
    sys.warnoptions[:] = request["warnoptions"]
    sys.breakpointhook = _no_debugger
    # a fork has the server's state, of which each rank of each test would draw the same
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _keep_captured(log: Path) -> None:
    """Have what pytest captures go through files that the parent reads where this process dies."""
    import _pytest.capture

    numbers = itertools.count()

    def named(**options: Any) -> Any:
        path = log.with_name(f"{log.name}-captured{next(numbers)}")
        return path.open("w+b", **options)

    vars(_pytest.capture)["TemporaryFile"] = named


def _no_debugger(*_args: object, **_options: object) -> NoReturn:
    __tracebackhide__ = True
    raise RuntimeError(
        "breakpoint() in a test on several ranks: each is a process without a terminal. "
        "Start pytest under torchrun, whose processes have one, or print what you look for (-s)"
    )


def _watch(control: int, folder: Path, rank: int) -> None:
    """Answer the parent, and end with it."""
    while True:
        try:
            asked = os.read(control, 1)
        except OSError:
            asked = b""
        if not asked:
            if hasattr(os, "killpg"):
                os.killpg(os.getpgid(0), signal.SIGKILL)
            os._exit(70)
        part = folder / f"where{rank}.part"
        part.write_bytes(pickle.dumps(report_on(threading.main_thread())))
        part.replace(folder / f"where{rank}")


def _run_pytest(request: dict[str, Any], said: Said) -> None:
    from _pytest.config import _prepareconfig

    # pytest warns that it comes too late to rewrite this package's asserts, which it is not to do
    package = sys.modules["pytest_modelhealth"]
    package.__doc__ = f"{package.__doc__} PYTEST_DONT_REWRITE"
    config = _prepareconfig(request["args"], None)
    _take_over(config, request)
    config.pluginmanager.register(plugin(config, request, said), "modelhealth.rank")
    config.hook.pytest_cmdline_main(config=config)


_NEUTRAL: dict[str, Any] = {
    # what chooses tests or ends the run is the parent's
    "keyword": "",
    "markexpr": "",
    "deselect": None,
    "maxfail": 0,
    "lf": False,
    "failedfirst": False,
    "newfirst": False,
    "stepwise": False,
    "pyargs": False,
    "cacheclear": False,
    # there is no terminal
    "usepdb": False,
    "trace": False,
    "setupshow": False,
    "log_file": os.devnull,
    "debug": None,
    "pastebin": None,
    # ranks are to xdist what its own workers are
    "dist": "no",
    "distload": False,
    "looponfail": False,
    "numprocesses": None,
    "maxprocesses": None,
    "tx": [],
    # one test uses few of the snapshots
    "disable_unused_snapshots": True,
}


def _take_over(config: pytest.Config, request: dict[str, Any]) -> None:
    """Make of the parent's command line that of this rank."""
    for name, value in _NEUTRAL.items():
        if hasattr(config.option, name):
            setattr(config.option, name, value)
    config.option.basetemp = request["basetemp"]
    if getattr(config.option, "allure_report_dir", None):
        config.option.allure_report_dir = request["allure"]
    config.args = [request["argument"]]
    config.option.file_or_dir = [request["argument"]]
    config.args_source = type(config).ArgsSource.ARGS
    # By this, plugins know that another process reports: they write no files and no summary.
    config.workerinput = request["workerinput"]  # type: ignore[attr-defined]
    config.workeroutput = {}  # type: ignore[attr-defined]
