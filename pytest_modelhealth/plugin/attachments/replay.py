"""Failing inspections as files under ``--modelhealth-replay DIR``, and a test run on one of them.

A file is written as soon as an inspection fails, while what it ran on is still there, and gets its
name where the test fails; of a test that passes after all, nothing stays.
"""

from __future__ import annotations

import os
import shlex
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pytest_modelhealth.errors import InspectionError, ModelHealthError
from pytest_modelhealth.plugin.inspections import MAKER, is_report, left_on_reports
from pytest_modelhealth.plugin.output_files import folder_name, rank_suffix, warn_once, writable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

    from pytest_modelhealth.bundles.inspecting import Recording, Run
    from pytest_modelhealth.inspector import Inspector
    from pytest_modelhealth.report import HealthReport, Observation

OPTION = "--modelhealth-replay"
_FROM = f"{OPTION}-from"
MOST = 4
"""How many failing inspections of one test are saved."""
_WARNED = pytest.StashKey[bool]()
_NUMBERS = count(1)


class _Bundle(NamedTuple):
    """A file that waits for the end of its test."""

    report: HealthReport
    path: Path
    lacks: list[str]


class _Recorder:
    """Saves the failing inspections of one test to a directory."""

    def __init__(self, item: pytest.Item, directory: Path) -> None:
        self._item, self._directory = item, directory
        self._inspections = 0
        self._latest: tuple[HealthReport, Recording] | None = None
        self._bundles: list[_Bundle] = []
        self._reasons: dict[int, str] = {}  # by id of the observation, why it is not saved

    def run(
        self, inspector: Inspector, run: Run, args: tuple[Any, ...], options: dict[str, Any]
    ) -> HealthReport:
        """Run an inspection, and save it if it fails."""
        from pytest_modelhealth.bundles.inspecting import Recording, judged_apart

        self._inspections += 1
        recording = Recording(inspector, args, options)
        report = run(*args, **options)
        recording.end()
        self._latest = report, recording
        if judged_apart(report)._failure() is not None:
            self._save()
        return report

    def _save(self) -> None:
        """Save the latest inspection; whatever happens, the test's own result stands."""
        from pytest_modelhealth.bundles.inspecting import not_in

        assert self._latest is not None
        (report, recording), reason = self._latest, ""
        if not recording.is_as_it_was():
            reason = "its model or batch was written to"
        elif len(self._bundles) == MOST:
            reason = f"{MOST} other failing inspections of this test are saved"
        else:
            path = self._directory / f".unfinished-{os.getpid()}-{next(_NUMBERS)}"
            self._bundles.append(_Bundle(report, path, []))
            test = {"id": self._item.nodeid, "number": self._inspections}
            try:
                self._bundles[-1].lacks.extend(not_in(recording.save(path, report, test)))
            except Exception as error:  # noqa: BLE001 - a disk that is full, or an odd model
                reason = self._lost(error)
                self._drop(self._bundles.pop())
        if reason:
            self._reasons[id(report.observation)] = reason

    def place(self, error: BaseException) -> tuple[list[_Bundle], str]:
        """Name the files of a test that failed; return them, and why there is none of `error`."""
        judged, reason = getattr(error, "report", None), ""
        if isinstance(error, ModelHealthError) and judged is not None:
            reason = self._reason(judged)
            seen = getattr(judged, "observation", None)
            self._bundles.sort(key=lambda one: one.report.observation is not seen)
        placed: list[_Bundle] = []
        try:
            while self._bundles:
                number = f"-{len(placed) + 1}" if placed else ""
                name = f"{folder_name(self._item.nodeid)}{rank_suffix()}{number}.pt"
                bundle = self._bundles[0]._replace(path=self._directory / name)
                self._bundles[0].path.replace(bundle.path)
                placed.append(bundle)
                self._bundles.pop(0)
        except OSError as lost:
            reason = self._lost(lost)
        return placed, reason

    def _reason(self, judged: HealthReport) -> str:
        """Return why what failed is not saved, ``""`` where it is; under other limits, it is now.

        `assert_healthy` may have had limits of its own.
        """
        if not is_report(judged):
            return "a comparison of two models is not saved; replay runs one model again"
        seen = judged.observation
        is_latest = self._latest is not None and self._latest[0].observation is seen
        if is_latest and not self._has(seen) and id(seen) not in self._reasons:
            self._save()
        if self._has(seen):
            return ""
        other = "it is of no run_inspection, or another one followed before its limits were named"
        return self._reasons.get(id(seen), other)

    def _has(self, seen: Observation) -> bool:
        return any(one.report.observation is seen for one in self._bundles)

    def discard(self) -> None:
        """Remove what waits for no failure any more, and let model and batch go."""
        while self._bundles:
            self._drop(self._bundles.pop())
        self._latest = None

    def _drop(self, bundle: _Bundle) -> None:
        with suppress(OSError):  # its directory is gone
            bundle.path.unlink(missing_ok=True)

    def _lost(self, error: Exception) -> str:
        """Warn that a file could not be written, and return why."""
        kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        reason = f"it could not be written: {kind}{error}"
        warn_once(self._item, _WARNED, f"{OPTION}: a failing inspection is not saved, {reason}")
        return reason


_RECORDER = pytest.StashKey[_Recorder]()


def _maker(hook: Callable[..., HealthReport]) -> Callable[..., Inspector]:
    """Return what makes inspectors whose inspections a function makes."""

    def make(*args: Any, **options: Any) -> Inspector:
        from pytest_modelhealth.bundles.inspecting import HookedInspector  # which brings torch

        inspector = HookedInspector(*args, **options)
        vars(inspector)["hook"] = hook
        return inspector

    return make


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("modelhealth")
    group.addoption(
        OPTION,
        metavar="DIR",
        default=None,
        help="save each failing inspection to DIR, a file each: batch, model state, random state",
    )
    group.addoption(
        _FROM,
        metavar="FILE",
        default=None,
        help="run the test that made this file of --modelhealth-replay on what is in it",
    )


def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Run the one test in this process: a project's own `-n` would start workers for it."""
    is_replay = early_config.known_args_namespace.modelhealth_replay_from is not None
    if is_replay and early_config.pluginmanager.hasplugin("xdist"):
        args += ["-n", "0"]


def pytest_configure(config: pytest.Config) -> None:
    """Make the directory, or read the file, before any test runs.

    Raises:
        pytest.UsageError: it cannot be made or written to, or the file cannot be read.
    """
    if (path := config.getoption(_FROM)) is not None:
        from pytest_modelhealth.bundles.data import read

        try:
            replay = _Replay(read(path))
        except InspectionError as error:
            raise pytest.UsageError(str(error)) from None
        config.pluginmanager.register(replay, "modelhealth.replay_outcome")
    elif (given := config.getoption(OPTION)) is not None:
        config.option.modelhealth_replay = str(writable(config, OPTION, given))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have the inspectors of this test save what fails."""
    directory = item.config.getoption(OPTION)
    if directory is not None and item.config.getoption(_FROM) is None:
        item.stash[_RECORDER] = _Recorder(item, Path(directory))
        item.stash[MAKER] = _maker(item.stash[_RECORDER].run)


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
            lines, commands = _told(recorder, call.excinfo.value, item)
        except Exception as error:  # noqa: BLE001 - a failing test must never be lost to its bundle
            lines, commands = [f"no bundle: {type(error).__name__}: {error}"], []
        if lines:
            report.sections.append(("modelhealth: replay", "\n".join(lines)))
            report.modelhealth_replay = commands  # type: ignore[attr-defined]
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
            del item.stash[_RECORDER]


def _told(
    recorder: _Recorder, error: BaseException, item: pytest.Item
) -> tuple[list[str], list[str]]:
    """Return what a failure says of its bundles, and the commands that run them again."""
    from pytest_modelhealth.rendering.notation import printable, shorten

    placed, reason = recorder.place(error)
    lines, commands = [f"no bundle of this failure: {reason}"] if reason else [], []
    here = item.config.invocation_params.dir
    test = os.path.relpath(item.path, here) + "".join(item.nodeid.partition("::")[1:])
    for bundle in placed:
        path = bundle.path.relative_to(here) if bundle.path.is_relative_to(here) else bundle.path
        commands.append(shlex.join(["pytest", f"{_FROM}={path}", test]))
        lines.append(f"{commands[-1]}   ({bundle.path.stat().st_size / 1e6:,.1f} MB)")
        lines += [f"  not in it: {shorten(printable(one), 110)}" for one in bundle.lacks]
    return lines, commands


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
            item.stash[MAKER] = _maker(self.run)

    def run(
        self, inspector: Inspector, run: Run, args: tuple[Any, ...], options: dict[str, Any]
    ) -> HealthReport:
        """Return what an inspection shows; the one of the bundle runs on what is in that."""
        from pytest_modelhealth.bundles.inspecting import replayed

        self._inspections += 1
        if self._inspections != self._test["number"]:
            return run(*args, **options)
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
