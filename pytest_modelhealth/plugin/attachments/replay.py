"""Failing inspections as bundles under ``--modelhealth-replay DIR``, and a run on one of them.

A bundle is written to a folder apart as soon as an inspection fails, while what it ran on is still
there, and gets its place where the test fails; of a test that passes after all, nothing stays.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelhealth.errors import InspectionError, ModelHealthError
from pytest_modelhealth.plugin.inspections import INSPECTOR, MAKER, is_report, left_on_reports
from pytest_modelhealth.plugin.output_files import folder_name, rank_suffix, warn_once, writable

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from pytest_modelhealth.bundles.file import Bundle, Saved
    from pytest_modelhealth.bundles.recording import Ran
    from pytest_modelhealth.capture import Request
    from pytest_modelhealth.inspector import Inspector
    from pytest_modelhealth.report import HealthReport

    Run = Callable[..., HealthReport]

OPTION = "--modelhealth-replay"
_FROM = f"{OPTION}-from"
_PARTS = ("weights", "inputs")
_DEFAULT_LIMIT = 1024.0
_MEGABYTE = 1_000_000
_SHOWN = 3
MOST = 4
"""How many bundles of one test are kept."""
_WARNED = pytest.StashKey[bool]()
_NUMBERS = count(1)


class Keeper:
    """Keeps what the failing inspections of one test were made of.

    Args:
        item: the test.
        directory: where bundles go.
        limit: the most bytes of tensors in one.
        without: parts to leave out.
    """

    def __init__(
        self, item: pytest.Item, directory: Path, limit: float, without: list[str]
    ) -> None:
        self._item, self._directory = item, directory
        self._limit, self._without = limit, without
        self._staged: list[tuple[HealthReport, Saved]] = []  # bundles that wait for the test's end
        self._latest: tuple[HealthReport, Ran, dict[str, Any]] | None = None
        self._reasons: dict[int, str] = {}  # by the observation's id, why it is not saved
        self._inspections = 0
        self._ran: Ran | None = None  # what runs now
        self._placed = 0

    def run(self, inspector: Inspector, of: str, run: Run, args: Any, options: Any) -> HealthReport:
        """Run an inspection, and take down what it is made of."""
        from pytest_modelhealth.bundles.recording import Ran

        self._inspections += 1
        self._ran = Ran(inspector, of, options, self._limit)
        try:
            return run(*args, **options)
        finally:
            self._ran = None

    def before(self, request: Request) -> None:
        """Take down what is about to run."""
        if self._ran is not None:
            self._ran.add(request)

    def after(self, report: HealthReport) -> None:
        """Save a failing inspection; whatever happens, the test's own result stands."""
        self._latest, ran, why = None, self._ran, ""
        if ran is None:
            why = "run_step, monitors and removable run more than an inspection"
        elif ran.too_large:
            why = f"its batches are over the limit of {self._limit / 1e6:,.0f} MB ({OPTION}-limit)"
        else:
            ran.end()
            fixture = self._item.stash.get(INSPECTOR, None)
            place = "" if fixture is None else "{0.path.name}:{0.line}".format(fixture.made[-1])
            test = {"id": self._item.nodeid, "number": self._inspections, "place": place}
            self._latest = report, ran, test
            self._stage(report, unless_healthy=True)
        if why:
            self._reasons[id(report.observation)] = why

    def place(self, error: BaseException) -> tuple[list[Saved], str]:
        """Return the bundles of a test that failed, now in their places.

        Args:
            error: what failed it.

        Returns:
            The bundles, that of `error` first, and why there is none of `error`, a phrase.
        """
        judged = error.report if isinstance(error, ModelHealthError) else None
        why = ""
        if judged is not None and not is_report(judged):
            why = "a comparison of two models is not saved; replay runs one model again"
        elif judged is not None:
            self._save_judged(judged)
            seen = judged.observation
            self._staged.sort(key=lambda staged: staged[0].observation is not seen)
            if all(report.observation is not seen for report, _ in self._staged):
                earlier = "another inspection followed it before its limits were named"
                why = self._reasons.get(id(seen), earlier)
        kept = []
        try:
            while self._staged:
                saved = self._staged[0][1]
                kept.append(saved._replace(folder=self._move(saved.folder)))
                self._staged.pop(0)
        except OSError as lost:
            why = self._lost(lost)
        return kept, why

    def discard(self) -> None:
        """Remove what waits for no failure any more, and let model and batches go."""
        while self._staged:
            self._drop(self._staged[-1])
        self._latest = None

    def _drop(self, staged: tuple[HealthReport, Saved]) -> None:
        self._staged.remove(staged)
        shutil.rmtree(staged[1].folder, ignore_errors=True)

    def _stage(self, report: HealthReport, *, unless_healthy: bool = False) -> None:
        """Write a bundle of the latest inspection to a folder apart.

        The random state is that of then: it was taken down before the run.
        """
        from pytest_modelhealth.bundles.recording import save
        from pytest_modelhealth.checks.judging import judge
        from pytest_modelhealth.report import HealthReport

        assert self._latest is not None
        _, ran, test = self._latest
        seen = report.observation
        try:
            # judged by itself, so that looking at it leaves no trace on the user's
            own = HealthReport(
                seen, report._settings, judge, report._noise, renderer=report._renderer
            )
            if unless_healthy and own._failure() is None:
                return
            if len(self._staged) >= MOST:
                # the first of a test are kept, and the latest, which is the one that ends a loop
                others = f"{MOST} other failing inspections of this test are saved"
                self._reasons[id(self._staged[-1][0].observation)] = others
                self._drop(self._staged[-1])
            folder = self._directory / f".unfinished-{os.getpid()}-{next(_NUMBERS)}"
            self._staged.append((report, save(folder, ran, own, test, self._without)))
        except Exception as error:  # noqa: BLE001 - an odd model must not fail for being saved
            self._reasons[id(seen)] = self._lost(error)

    def _save_judged(self, judged: HealthReport) -> None:
        """Save the latest inspection under the limits that failed it, if that is not done yet.

        `assert_healthy` may have had limits of its own.
        """
        seen = judged.observation
        if self._latest is None or self._latest[0].observation is not seen:
            return
        same = [staged for staged in self._staged if staged[0].observation is seen]
        if any(report._settings == judged._settings for report, _ in same):
            return
        if not self._latest[1].is_as_it_was():
            reason = "model or batch changed between the inspection and its assert_healthy(...)"
            self._reasons[id(seen)] = reason
            return
        for staged in same:
            self._drop(staged)
        self._stage(judged)

    def _move(self, folder: Path) -> Path:
        """Move a bundle's files to their place; an earlier bundle there is replaced."""
        self._placed += 1
        name = folder_name(self._item.nodeid) + rank_suffix()
        place = self._directory / (name + (f"-{self._placed}" if self._placed > 1 else ""))
        place.mkdir(exist_ok=True)  # which other destinations may share
        for file in folder.iterdir():
            file.replace(place / file.name)
        folder.rmdir()
        return place

    def _lost(self, error: Exception) -> str:
        """Warn that a bundle could not be written, and return why."""
        kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        why = f"it could not be written: {kind}{error}"
        warn_once(self._item, _WARNED, f"{OPTION}: a failing inspection is not saved, {why}")
        return why


def _maker(hooks: Keeper | _Replay) -> Callable[..., Inspector]:
    """Return what makes inspectors whose inspections `hooks` makes."""

    def make(*args: Any, **options: Any) -> Inspector:
        from pytest_modelhealth.bundles.recording import HookedInspector  # which brings torch

        made = HookedInspector(*args, **options)
        made.hooks = hooks
        return made

    return make


_KEEPER = pytest.StashKey[Keeper]()


def _megabytes(given: str) -> float:
    limit = float(given)
    if not (limit > 0 and math.isfinite(limit)):
        what = f"must be a number of megabytes above 0, not {limit:g}"
        raise pytest.UsageError(f"{OPTION}-limit: {what}")
    return limit


def _parts(given: str) -> list[str]:
    parts = [part.strip() for part in given.split(",") if part.strip()]
    for part in parts:
        if part not in _PARTS:
            what = f"no such part {part!r}; there are {' and '.join(_PARTS)}"
            raise pytest.UsageError(f"{OPTION}-without: {what}")
    return parts


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("modelhealth")
    group.addoption(
        OPTION,
        metavar="DIR",
        default=None,
        help="save each failing inspection to DIR, a folder a test: batch, model state, random "
        "state, settings, report; python -m pytest_modelhealth replay runs one again",
    )
    group.addoption(
        f"{OPTION}-limit",
        metavar="MB",
        type=_megabytes,
        default=None,  # a value would have every run load the settings
        help="the most megabytes of tensors in one of them: over it the weights are left out, then "
        f"the inputs (default: {_DEFAULT_LIMIT:g})",
    )
    group.addoption(
        f"{OPTION}-without",
        metavar="weights|inputs",
        action="extend",
        type=_parts,
        default=None,
        help="what to leave out of them: weights, inputs or both",
    )
    group.addoption(_FROM, default=None, help=argparse.SUPPRESS)  # the command ``replay`` sets it


def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Run the one test in this process: a project's own `-n` would start workers for it."""
    is_replay = early_config.known_args_namespace.modelhealth_replay_from is not None
    if is_replay and early_config.pluginmanager.hasplugin("xdist"):
        args += ["-n", "0"]


def pytest_configure(config: pytest.Config) -> None:
    """Make the directory now, so that a long run does not end without its bundles.

    Raises:
        pytest.UsageError: it cannot be made or written to, or the bundle to run cannot be read.
    """
    if (path := config.getoption(_FROM)) is not None:
        from pytest_modelhealth.bundles.file import read

        try:
            bundle = read(path)
        except InspectionError as error:
            raise pytest.UsageError(str(error)) from None
        config.pluginmanager.register(_Replay(bundle), "modelhealth.replay_outcome")
    given = config.getoption(OPTION)
    if given is None:
        return
    config.option.modelhealth_replay = str(writable(config, OPTION, given))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have the inspectors of this test keep what fails."""
    directory = item.config.getoption(OPTION)
    if directory is not None and item.config.getoption(_FROM) is None:
        limit = (item.config.getoption(f"{OPTION}-limit") or _DEFAULT_LIMIT) * _MEGABYTE
        without = item.config.getoption(f"{OPTION}-without") or []
        keeper = Keeper(item, Path(directory), limit, without)
        item.stash[_KEEPER] = keeper
        item.stash[MAKER] = _maker(keeper)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Place the bundles of a test that failed and say how to run them; remove those of others."""
    report = yield
    keeper = item.stash.get(_KEEPER, None)
    if keeper is None:
        return report
    if report.failed and call.excinfo is not None:
        try:
            _place(keeper, report, call.excinfo.value, item.config.invocation_params.dir)
        except Exception as error:  # noqa: BLE001 - a failing test must never be lost to its bundle
            text = f"no bundle: {type(error).__name__}: {error}"
            report.sections.append(("modelhealth: replay", text))
    if call.when == "teardown":
        keeper.discard()
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Leave nothing behind where the run is ended from the keyboard."""
    try:
        return (yield)
    finally:
        if _KEEPER in item.stash:
            item.stash[_KEEPER].discard()
            del item.stash[_KEEPER]


def _place(keeper: Keeper, report: pytest.TestReport, error: BaseException, here: Path) -> None:
    """Say of each bundle the command that runs it again, and what it lacks."""
    from pytest_modelhealth.rendering.notation import printable, shorten

    kept, why = keeper.place(error)
    lines = [f"no bundle of this failure: {why}"] if why else []
    for bundle in kept:
        lines.append(f"{_command(bundle.folder, here)}   ({bundle.bytes / _MEGABYTE:,.1f} MB)")
        lines += [f"  without {part}: {why}" for part, why in bundle.left_out.items()]
        missing = [m for m in bundle.missing if m.reason not in bundle.left_out.values()]
        lines += [f"  not in it: {shorten(printable(str(m)), 110)}" for m in missing[:_SHOWN]]
        if len(missing) > _SHOWN:
            lines.append(f"  not in it: {len(missing) - _SHOWN:,} more")
    if lines:
        report.sections.append(("modelhealth: replay", "\n".join(lines)))
    if kept:
        told = [str(bundle.folder) for bundle in kept]
        report.modelhealth_replay = told  # type: ignore[attr-defined]


def _command(folder: Path, here: Path) -> str:
    shown = folder.relative_to(here) if folder.is_relative_to(here) else folder
    return f"python -m pytest_modelhealth replay {shlex.quote(str(shown))}"


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say where the bundles are, and how to run the first."""
    folders = left_on_reports(terminalreporter, "modelhealth_replay")
    if folders:
        count = "1 failing inspection" if len(folders) == 1 else f"{len(folders)} inspections"
        command = _command(Path(folders[0]), config.invocation_params.dir)
        where = "" if len(folders) == 1 else f" in {config.getoption(OPTION)}"
        terminalreporter.write_line(f"modelhealth: {count} saved{where}; run it again: {command}")


class _Replay:
    """Has one inspection of the test be the bundle's; an end without it is wrong use."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self._inspections = 0
        self._told: list[str] | None = None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._inspections = 0
        item.stash[MAKER] = _maker(self)

    def run(self, inspector: Inspector, of: str, run: Run, args: Any, options: Any) -> HealthReport:
        """Return the bundle's report, made with the test's own functions and what it lacks."""
        from pytest_modelhealth.bundles.replaying import replayed

        self._inspections += 1
        test = self._bundle.content["test"]
        if test is None or self._inspections != test["number"]:
            return run(*args, **options)
        inspector._begin()
        batch = dict(zip(("inputs", "target"), args, strict=False)) if of == "batch" else {}
        given = {
            name: value
            for name, value in (batch | options).items()
            if name in ("loss", "backward") or self._bundle.lacks(name)
        }
        model, settings = inspector._model, inspector._settings
        report, self._told = replayed(self._bundle, model, settings, given)
        inspector._note_report(report)
        return report

    def before(self, _: object) -> None:
        """Do nothing: a replay is not saved again."""

    after = before

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._told is None:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._told or [self._why_not()]:
            terminalreporter.write_line(f"modelhealth: {line}")

    def _why_not(self) -> str:
        test = self._bundle.content["test"]
        if test is None or not self._inspections or self._inspections >= test["number"]:
            return "the inspection of the bundle was not replayed; what stopped it stands above"
        return (
            f"nothing was replayed: the bundle is of inspection {test['number']} of its test, "
            f"which made {self._inspections}"
        )
