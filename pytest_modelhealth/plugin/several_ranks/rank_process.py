"""What a rank does: it runs pytest with one test, and says to its parent what came of it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from pytest_modelhealth.errors import InspectionError
from pytest_modelhealth.plugin.several_ranks import snapshots
from pytest_modelhealth.plugin.several_ranks.waiting import report_on

if TYPE_CHECKING:
    import warnings

Say = Callable[[str, Any], None]


def run(request: dict[str, Any], control: Any, streams: list[Any]) -> NoReturn:
    """Run one test, and end this process.

    Args:
        request: what to run, as `running` makes it.
        control: a connection to the parent, which asks where this rank is, and reads what it says.
        streams: connections on what to write to in place of a file, if anything.
    """
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C is the parent's, and what a rank starts ends with it
    say = partial(_send, control, threading.Lock())
    try:
        _become(request, streams)
        threading.Thread(target=_watch, args=(control, say), daemon=True).start()
        _run_pytest(request, say)
    except BaseException as error:  # noqa: BLE001 - the parent tells it
        text = str(error) if type(error).__name__ == "UsageError" else traceback.format_exc()
        say("problems", text)
    say("finished", True)
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            file.flush()
    # No process group is destroyed: that waits for ranks that may be dead.
    os._exit(0)


def _send(control: Any, lock: threading.Lock, name: str, content: Any) -> None:
    """Give the parent's `Rank` a content by the name of the attribute that takes it.

    What is no plain data in it becomes text, as xdist takes nothing else. Any thread may call this.
    """
    plain = json.loads(json.dumps(content, default=str, skipkeys=True))
    with lock, contextlib.suppress(OSError):  # the parent may be gone
        control.send((name, plain))


def _become(request: dict[str, Any], streams: list[Any]) -> None:
    """Take over what a process started by pytest itself would have."""
    for number, stream in enumerate(streams, 1):
        os.dup2(stream.fileno(), number)
    if request["log"]:
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        _keep_captured(Path(request["log"]))
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
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


def _watch(control: Any, say: Say) -> None:
    """Answer the parent, and end with it."""
    while True:
        try:
            control.recv()
        except (EOFError, OSError):
            if hasattr(os, "killpg"):
                os.killpg(os.getpgid(0), signal.SIGKILL)
            os._exit(70)
        say("where", report_on(threading.main_thread()))


def _run_pytest(request: dict[str, Any], say: Say) -> None:
    from _pytest.config import _prepareconfig

    # pytest warns that it comes too late to rewrite this package's asserts, which it is not to do
    package = sys.modules["pytest_modelhealth"]
    package.__doc__ = f"{package.__doc__} PYTEST_DONT_REWRITE"
    config = _prepareconfig(request["args"], None)
    _take_over(config, request)
    config.pluginmanager.register(_Reporting(config, request, say), "modelhealth.rank")
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


class _Reporting:
    """The plugin of a rank: it keeps the one test, joins the group, hands on what is said."""

    def __init__(self, config: pytest.Config, request: dict[str, Any], say: Say) -> None:
        self._config, self._request, self._say = config, request, say

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter._tw._file = Path(os.devnull).open("w")  # noqa: SIM115 - until the rank ends

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self) -> None:
        # without it there is no summary either, which is the parent's
        self._config.pluginmanager.unregister(name="terminalreporter")
        if self._request["rank"]:
            snapshots.write_nothing(self._config)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        wanted = self._request["nodeid"]
        names = [item.nodeid for item in items]
        items[:] = [item for item in items if item.nodeid == wanted][:1]
        if not items:
            found = f"found {', '.join(names[:3])} instead" if names else "found nothing"
            self._say(
                "problems",
                f"this rank does not find the test: it {found}; a test must have the same name in "
                "each process, whatever it is parametrised over",
            )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            text = f"collection failed on this rank\n{report.longreprtext}"
            self._say("problems", text)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        _join(self._request)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._say("reports", data)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        if when != "runtest":  # the parent collects too
            return
        category = warning_message.category
        told = {
            "text": str(warning_message.message),
            "category": (category.__module__, category.__qualname__),
            "file": warning_message.filename,
            "line": warning_message.lineno,
            "location": location,
        }
        self._say("warnings", told)

    def pytest_internalerror(self, excrepr: object) -> None:
        self._say("problems", f"pytest itself failed on this rank\n{excrepr}")

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if isinstance(excinfo.value, pytest.exit.Exception):
            told = {"text": str(excinfo.value), "code": excinfo.value.returncode}
            self._say("exit", told)
        else:
            self._say("problems", f"interrupted: {excinfo.exconly()}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        for one in snapshots.executions(self._config, self._request["rank"]):
            self._say("snapshots", one)

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self) -> bool:
        return True  # the parent keeps the time, and knows where all ranks are


def _join(request: dict[str, Any]) -> None:
    """Make the default process group of a rank's process.

    Raises:
        InspectionError: this build of torch has no gloo, or another rank does not come.
    """
    import torch.distributed as dist
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    require_gloo()
    rank, size, seconds = request["rank"], request["size"], request["seconds"]
    store = FileStore(str(Path(request["folder"]) / "store"), size)
    limit = timedelta(seconds=seconds + 60)  # the parent's comes before it
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        # a rank whose test skips at once must not end while another still connects to it
        store.set(f"connected/{rank}", "")
        store.wait([f"connected/{other}" for other in range(size)], limit)
    except dist.DistError as error:
        raise InspectionError(f"rank {rank} of {size} found no process group: {error}") from error


def require_gloo() -> None:
    """Do nothing where torch can connect processes on the CPU.

    Raises:
        InspectionError: it cannot.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        raise InspectionError(
            "tests on several ranks need torch.distributed with gloo, which this build of torch "
            "does not have: install a build that has it, or skip the test with "
            "pytest.mark.skipif(not torch.distributed.is_available(), reason=...)"
        )
