"""What a rank does: it runs pytest with one test, and says to its parent what came of it."""

from __future__ import annotations

import contextlib
import faulthandler
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

from pytest_modelhealth.plugin.several_ranks import write_no_snapshots

if TYPE_CHECKING:
    import warnings

Say = Callable[[str, Any], None]


def run(request: dict[str, Any], control: Any) -> NoReturn:
    """Run one test, and end this process."""
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C is the parent's, and what a rank starts ends with it
    say = partial(_say, control)
    try:
        _become(request)
        threading.Thread(target=_end_with_parent, args=(control,), daemon=True).start()
        _run_pytest(request, say)
    except BaseException as error:  # noqa: BLE001 - the parent tells it
        text = str(error) if type(error).__name__ == "UsageError" else traceback.format_exc()
        say("problems", text)
    say("ends", True)
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            file.flush()
    # No process group is destroyed: that waits for ranks that may be dead.
    os._exit(0)


def _say(control: Any, name: str, content: Any) -> None:
    """Add a content to the parent's list of that name; what is no plain data becomes text."""
    said = json.dumps([name, content], default=str, skipkeys=True)
    with contextlib.suppress(OSError):  # the parent may be gone
        control.send_bytes(said.encode())


def _become(request: dict[str, Any]) -> None:
    """Take over what a process started by pytest itself would have."""
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if not request["prints"]:
        os.dup2(log, 1)
        os.dup2(log, 2)
    if hasattr(faulthandler, "register"):  # by which the parent asks where this rank is
        faulthandler.register(signal.SIGUSR1, log, all_threads=False)
    os.environ.clear()
    os.environ.update(request["environ"])
    os.chdir(request["cwd"])
    sys.warnoptions[:] = request["warnoptions"]
    # a fork has the server's state, of which each rank of each test would draw the same
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def _end_with_parent(control: Any) -> None:
    with contextlib.suppress(EOFError, OSError):
        control.recv()  # the parent says nothing: this ends where it does
    if hasattr(os, "killpg"):
        os.killpg(os.getpgid(0), signal.SIGKILL)
    os._exit(70)


def _run_pytest(request: dict[str, Any], say: Say) -> None:
    from _pytest.config import _prepareconfig

    # pytest warns that it comes too late to rewrite this package's asserts, which it is not to do
    package = sys.modules["pytest_modelhealth"]
    package.__doc__ = f"{package.__doc__} PYTEST_DONT_REWRITE"
    config = _prepareconfig(request["args"], None)
    for name, value in _NEUTRAL.items():
        if hasattr(config.option, name):
            setattr(config.option, name, value)
    config.option.basetemp = request["basetemp"]
    config.args = config.option.file_or_dir = [request["argument"]]
    config.args_source = type(config).ArgsSource.ARGS
    # By this, plugins know that another process reports: they write no files and no summary.
    config.workerinput = request["workerinput"]  # type: ignore[attr-defined]
    config.workeroutput = {}  # type: ignore[attr-defined]
    config.pluginmanager.register(_Reporting(config, request, say), "modelhealth.rank")
    config.hook.pytest_cmdline_main(config=config)


_OFF = (
    "deselect maxfail lf failedfirst newfirst stepwise pyargs cacheclear "  # the parent chooses
    "usepdb trace setupshow debug pastebin allure_report_dir "  # and has the terminal
    "distload looponfail numprocesses maxprocesses"  # ranks are to xdist what its workers are
)
_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(_OFF.split()),
    "keyword": "",
    "markexpr": "",
    "log_file": os.devnull,
    "dist": "no",
    "tx": [],
    "disable_unused_snapshots": True,  # one test uses few of them
}
"""The parent's command line, as far as it is not this rank's."""


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
            write_no_snapshots(self._config)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        names = [item.nodeid for item in items]
        items[:] = [item for item in items if item.nodeid == self._request["nodeid"]][:1]
        if not items:
            instead = f"found {', '.join(names[:3])} instead" if names else "found nothing"
            self._say(
                "problems",
                f"this rank does not find the test: it {instead}; a test must have the same name "
                "in each process, whatever it is parametrised over",
            )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._say("problems", f"collection failed on this rank\n{report.longreprtext}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        _join(self._request)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._say("reports", data)

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        if when == "runtest":  # the parent collects too
            category = warning_message.category
            text, file = str(warning_message.message), warning_message.filename
            kind = (category.__module__, category.__qualname__)
            self._say("warnings", [text, kind, file, warning_message.lineno])

    def pytest_internalerror(self, excrepr: object) -> None:
        self._say("problems", f"pytest itself failed on this rank\n{excrepr}")

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self._say("problems", f"interrupted: {excinfo.exconly()}")

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self) -> bool:
        return True  # the parent keeps the time, and knows where all ranks are


def _join(request: dict[str, Any]) -> None:
    """Make the default process group of a rank's process."""
    import torch.distributed as dist

    rank, size = request["rank"], request["size"]
    store = dist.FileStore(request["store"], size)  # type: ignore[attr-defined]
    limit = timedelta(seconds=request["seconds"] + 60)  # the parent's comes before it
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
    # a rank whose test skips at once must not end while another still connects to it
    store.set(f"connected/{rank}", "")
    store.wait([f"connected/{other}" for other in range(size)], limit)
