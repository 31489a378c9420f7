"""A test's failing inspection as a file under ``--modelhealth-replay DIR``, and a run on one.

It is written as soon as an inspection fails, while what it ran on is still there, and gets its name
where the test fails; of a test that passes after all, nothing stays.
"""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelhealth.drafts import new_name
from pytest_modelhealth.errors import InspectionError, ModelHealthError
from pytest_modelhealth.plugin.inspections import AROUND, is_report, left_on_reports
from pytest_modelhealth.plugin.options import require_wing
from pytest_modelhealth.plugin.output_files import folder_name, rank_suffix, warn_once, writable
from pytest_modelhealth.wings import wing

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from pytest_modelhealth.bundles.inspecting import Recording
    from pytest_modelhealth.inspector import Inspector
    from pytest_modelhealth.report import HealthReport

OPTION = "--modelhealth-replay"
_FROM = f"{OPTION}-from"
_WARNED = pytest.StashKey[bool]()


class _Recorder:
    """Saves the first failing inspection of one test, or else the one that it failed by."""

    def __init__(self, item: pytest.Item, directory: Path) -> None:
        self._item = item
        self._path = directory / new_name()
        self._place = directory / f"{folder_name(item.nodeid)}{rank_suffix()}.pt"
        self._inspections = 0
        self._latest: tuple[HealthReport, Recording] | None = None
        self._saved: HealthReport | None = None
        self._lacks: list[str] = []
        self._reason = ""  # why none was saved, when it was tried last

    def run(
        self, inspector: Inspector, run: Callable[..., HealthReport], *args: Any, **options: Any
    ) -> HealthReport:
        """Run an inspection, and save it if it is the first that fails."""
        self._inspections += 1
        recording: Recording = wing("bundles.inspecting:Recording")(inspector, args, options)
        report = run(*args, **options)
        recording.end()
        self._latest = report, recording
        judged = wing("bundles.inspecting:judged_apart")(report)
        if self._saved is None and judged._failure() is not None:
            self._save()
        return report

    def _save(self) -> None:
        """Save the latest inspection; whatever happens, the test's own result stands."""
        assert self._latest is not None
        report, recording = self._latest
        if not recording.is_as_it_was():
            self._reason = "its model or batch was written to"
            return
        test = {"id": self._item.nodeid, "number": self._inspections}
        try:
            saved = recording.save(self._path, report, test)
            self._lacks = wing("bundles.inspecting:not_in")(saved)
        except Exception as error:  # noqa: BLE001 - a disk that is full, or an odd model
            self._lost(error)
            self.discard()
        else:
            self._saved = report

    def place(self, error: BaseException) -> tuple[Path | None, list[str], str]:
        """Name the file of a test that failed.

        Returns:
            The file, if there is one, what is not in it, and why there is none of `error`.
        """
        if isinstance(error, ModelHealthError) and error.report is not None:
            self._require(error.report)
        if self._saved is None:
            return None, [], self._reason
        try:
            self._path.replace(self._place)
        except OSError as lost:
            self._lost(lost)
            return None, [], self._reason
        self._saved = None
        return self._place, self._lacks, ""

    def _require(self, judged: HealthReport) -> None:
        """Have what failed saved, and nothing else.

        It may be another one than the first, or have failed by limits of its `assert_healthy`.
        """
        seen = judged.observation if is_report(judged) else None
        if self._saved is not None and self._saved.observation is seen:
            return
        self.discard()
        latest = self._latest
        if latest is not None and latest[0].observation is seen:
            self._save()
        elif not self._reason:
            self._reason = "it is of no run_inspection, or another one followed it"

    def discard(self) -> None:
        """Remove the file that waits for no failure any more."""
        with suppress(OSError):  # its directory is gone
            self._path.unlink(missing_ok=True)
        self._saved = None

    def _lost(self, error: Exception) -> None:
        """Warn that a file could not be written."""
        kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        self._reason = f"it could not be written: {kind}{error}"
        text = f"{OPTION}: a failing inspection is not saved, {self._reason}"
        warn_once(self._item, _WARNED, text)


_RECORDER = pytest.StashKey[_Recorder]()


def pytest_configure(config: pytest.Config) -> None:
    """Make the directory, or read the file, before any test runs.

    Raises:
        pytest.UsageError: it cannot be made or written to, or the file cannot be read.
    """
    if (path := config.getoption(_FROM)) is not None:
        try:
            replay = _Replay(wing("bundles.data:read")(path))
        except InspectionError as error:
            raise pytest.UsageError(str(error)) from None
        config.pluginmanager.register(replay, "modelhealth.replay_outcome")
    else:
        require_wing("bundles", OPTION)
        directory = writable(config, OPTION, config.getoption(OPTION))
        config.option.modelhealth_replay = str(directory)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have the inspectors of this test save what fails."""
    if item.config.getoption(_FROM) is None:
        item.stash[_RECORDER] = _Recorder(item, Path(item.config.getoption(OPTION)))
        item.stash[AROUND] = item.stash[_RECORDER].run


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Say of a test that failed how to run its inspections again; remove those of others."""
    report = yield
    recorder = item.stash.get(_RECORDER, None)
    if recorder is None:
        return report
    if report.failed and call.excinfo is not None:
        try:
            _say(recorder, call.excinfo.value, item, report)
        except Exception as error:  # noqa: BLE001 - a failing test must never be lost to its bundle
            text = f"no bundle: {type(error).__name__}: {error}"
            report.sections.append(("modelhealth: replay", text))
    if call.when == "teardown":
        recorder.discard()
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Leave nothing behind where the run is ended from the keyboard."""
    try:
        return (yield)
    finally:
        if _RECORDER in item.stash:
            item.stash[_RECORDER].discard()
            del item.stash[_RECORDER], item.stash[AROUND]  # which hold model and batch


def _say(
    recorder: _Recorder, error: BaseException, item: pytest.Item, report: pytest.TestReport
) -> None:
    """Say in a failure how to run its inspection again, and what its bundle lacks."""
    from pytest_modelhealth.rendering.notation import printable, shorten

    path, lacks, reason = recorder.place(error)
    if path is None:
        lines = [f"no bundle of this failure: {reason}"] if reason else []
    else:
        here = item.config.invocation_params.dir
        test = os.path.relpath(item.path, here) + "".join(item.nodeid.partition("::")[1:])
        shown = path.relative_to(here) if path.is_relative_to(here) else path
        command = shlex.join(["pytest", f"{_FROM}={shown}", test])
        report.modelhealth_replay = [command]  # type: ignore[attr-defined]
        lines = [f"{command}   ({path.stat().st_size / 1e6:,.1f} MB)"]
        lines += [f"  not in it: {shorten(printable(one), 110)}" for one in lacks]
    if lines:
        report.sections.append(("modelhealth: replay", "\n".join(lines)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many inspections were saved, and how to run the first again."""
    commands = left_on_reports(terminalreporter, "modelhealth_replay")
    if commands:
        saved = f"{len(commands)} failing inspection{'s' * (len(commands) > 1)} saved"
        terminalreporter.write_line(f"modelhealth: {saved}; run it again: {commands[0]}")


class _Replay:
    """Has one inspection of a test run on a bundle; an end without it is wrong use."""

    def __init__(self, bundle: Mapping[str, Any]) -> None:
        self._bundle, self._test = bundle, bundle["test"]
        self._inspections = 0
        self._lines: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        if item.nodeid == self._test["id"]:
            self._inspections = 0
            item.stash[AROUND] = self.run

    def run(
        self, inspector: Inspector, run: Callable[..., HealthReport], *args: Any, **options: Any
    ) -> HealthReport:
        """Return what an inspection shows; the one of the bundle runs on what is in that."""
        self._inspections += 1
        if self._inspections != self._test["number"]:
            return run(*args, **options)
        replayed = wing("bundles.inspecting:replayed")
        report: HealthReport
        report, self._lines = replayed(self._bundle, inspector, run, args, options)
        return report

    @pytest.hookimpl(trylast=True)  # syrupy adds to what stands there
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not self._lines:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        from pytest_modelhealth.rendering.notation import printable

        not_run = (
            f"nothing was replayed of inspection {self._test['number']} of {self._test['id']}, "
            f"which began {self._inspections} here"
        )
        for line in self._lines or [not_run]:
            terminalreporter.write_line(f"modelhealth: {printable(line)}")
