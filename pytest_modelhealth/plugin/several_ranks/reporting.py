"""Hands on what pytest says in a rank, through a file that the parent reads as it grows."""

from __future__ import annotations

import os
import pickle
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelhealth.plugin.several_ranks import snapshots
from pytest_modelhealth.plugin.several_ranks.group import join

if TYPE_CHECKING:
    import warnings
    from collections.abc import Iterator


class Said:
    """What one rank said: the rank writes, the parent reads.

    Args:
        path: of the file between them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def say(self, kind: str, **content: Any) -> None:
        """Write a message; what is no plain data in it becomes text."""
        packed = pickle.dumps({"kind": kind, **_plain(content)})
        with self._path.open("ab") as file:
            file.write(len(packed).to_bytes(8, "little") + packed)

    def news(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that are whole and not read yet."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._read)
            while len(head := file.read(8)) == 8:
                packed = file.read(int.from_bytes(head, "little"))
                if len(packed) < int.from_bytes(head, "little"):
                    return
                self._read = file.tell()
                yield pickle.loads(packed)


def _plain(value: Any) -> Any:
    """Return `value` as what xdist takes too: a report must never be lost to what hangs on it."""
    if value is None or type(value) in (bool, int, float, str, bytes):
        return value
    for kind in (int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, list | set | frozenset):
        return [_plain(item) for item in value]
    if isinstance(value, PurePath | os.PathLike):
        return os.fspath(value)
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - of an odd object the kind has to do
        return f"<{type(value).__name__}>"


def plugin(config: pytest.Config, request: dict[str, Any], said: Said) -> object:
    """Return the plugin of a rank: it keeps the one test, joins the group, hands on what is said.

    Args:
        config: that of the rank.
        request: what the parent asked for.
        said: what takes the reports.
    """
    return _Reporting(config, request, said)


class _Reporting:
    def __init__(self, config: pytest.Config, request: dict[str, Any], said: Said) -> None:
        self._config, self._request, self._said = config, request, said

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
            self._said.say(
                "problem",
                text=f"this rank does not find the test: it {found}; a test must have the same "
                "name in each process, whatever it is parametrised over",
            )

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._said.say("problem", text=f"collection failed on this rank\n{report.longreprtext}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        join(self._request)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._said.say("report", data=data)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        if when != "runtest":  # the parent collects too
            return
        category = warning_message.category
        self._said.say(
            "warning",
            text=str(warning_message.message),
            category=(category.__module__, category.__qualname__),
            file=warning_message.filename,
            line=warning_message.lineno,
            location=location,
        )

    def pytest_internalerror(self, excrepr: object) -> None:
        self._said.say("problem", text=f"pytest itself failed on this rank\n{excrepr}")

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if isinstance(excinfo.value, pytest.exit.Exception):
            self._said.say("exit", text=str(excinfo.value), code=excinfo.value.returncode)
        else:
            self._said.say("problem", text=f"interrupted: {excinfo.exconly()}")

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        self._said.say("snapshots", used=snapshots.executions(self._config, self._request["rank"]))

    @pytest.hookimpl(optionalhook=True, tryfirst=True)
    def pytest_timeout_set_timer(self) -> bool:
        return True  # the parent keeps the time, and knows where all ranks are
