"""Records what every test inspects, where a destination wants the run as a whole.

Each test's results are written to a file of their own as it ends, by the process that ran it, and
read from there one by one at the end: neither memory nor xdist's channel holds them.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Generator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_modelhealth.drafts import new_name, sweep
from pytest_modelhealth.plugin import RESULTS
from pytest_modelhealth.plugin.inspections import INSPECTOR, headline
from pytest_modelhealth.plugin.snapshots import SNAPSHOT_CHECKS
from pytest_modelhealth.wings import wing

if TYPE_CHECKING:
    from pytest_modelhealth.runs.run import Run

_WRONG_USE = pytest.ExitCode.USAGE_ERROR
_MESSAGE = pytest.StashKey[str]()
_Made = tuple[Any, Path, int]  # a result, and the line that made it
_MADE = pytest.StashKey[list[_Made]]()


def record(config: pytest.Config) -> None:
    """Record in this process: the one that reports, or a worker of xdist."""
    worker = getattr(config, "workerinput", None)
    if worker is None:
        sweep(place := Path(tempfile.gettempdir()))
        folder = place / new_name()
        folder.mkdir(mode=0o700)
    else:
        folder = Path(worker[RESULTS])
    config.pluginmanager.register(_Recorder(folder), "modelhealth.recorder")
    if worker is None:
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        config.pluginmanager.register(_Collector(folder, config.rootpath), "modelhealth.collector")


class _Recorder:
    """Writes down what a test inspected; runs where the tests run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        inspector = item.stash.get(INSPECTOR, None)  # gone when its fixture is torn down
        try:
            return (yield)
        finally:
            made = inspector.made if inspector is not None else []
            reports: list[_Made] = [(m.report, m.path, m.line) for m in made]
            item.stash[_MADE] = reports + item.stash.get(SNAPSHOT_CHECKS, [])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[Any]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Leave the name of the file on the test's last report, which crosses from workers."""
        report = yield
        if call.excinfo is not None and not report.skipped:
            item.stash.setdefault(_MESSAGE, headline(call.excinfo.value))
        made = item.stash.get(_MADE, [])
        if call.when == "teardown" and made:
            report.modelhealth_results = self._written(item, made)  # type: ignore[attr-defined]
            item.stash[_MADE] = []  # items live as long as the session
        return report

    def _written(self, item: pytest.Item, made: list[_Made]) -> dict[str, str]:
        """Write a test's results; return the name of the file, or why there is none."""
        try:
            # a test may have emptied the folder for temporary files
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path, line, _ = item.location
            test = {
                "id": item.nodeid,
                "file": path,
                "line": (line or 0) + 1,
                "message": item.stash.get(_MESSAGE, ""),
                "results": [_recorded(*one, item.config.rootpath) for one in made],
            }
            with tempfile.NamedTemporaryFile(
                "w", encoding="ascii", dir=self._folder, suffix=".json", delete=False
            ) as file:
                json.dump(test, file, allow_nan=False)
        except Exception as error:  # noqa: BLE001 - a test must never fail for being written down
            return {"problem": f"{type(error).__name__}: {error}"}
        return {"file": Path(file.name).name}


def _recorded(result: Any, path: Path, line: int, root: Path) -> dict[str, Any]:
    """Return a result with its places as pytest shows them: from the run's folder, if in it."""
    from pytest_modelhealth.rendering.recorded import record

    made = record(result, _shown(f"{path}:{line}", root))
    if made["kind"] == "inspection":
        lists = ("violations", "warnings", "inconclusive", "waived", "layers")
        for found in (one for name in lists for one in made[name]):
            found |= {key: _shown(found[key], root) for key in ("defined_at", "called_at")}
    return made


def _shown(place: str, root: Path) -> str:
    name, _, line = place.rpartition(":")
    is_inside = name and Path(name).is_relative_to(root)
    return f"{Path(name).relative_to(root).as_posix()}:{line}" if is_inside else place


class _Tests:
    """The tests of a run, read from disk one by one, and what failed without a result."""

    def __init__(self, ended: list[tuple[dict[str, Any], Path | None]]) -> None:
        self._ended = ended

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for known, file in self._ended:
            test = {"results": []} if file is None else json.loads(file.read_text("ascii"))
            results = test.pop("results")
            yield {**known, **test, "results": results}


class _Collector:
    """Puts together what all tests left, and hands it on when the run ends."""

    def __init__(self, folder: Path, root: Path) -> None:
        self._folder, self._root = folder, root
        self._outcomes: dict[str, tuple[str, float]] = {}
        self._failures: dict[str, dict[str, Any]] = {}
        self._ended: dict[str, Path | None] = {}
        self._skipped: dict[str, str] = {}
        self._notes: list[str] = []
        self._why = ""  # it ended early
        self._is_handed_on = False

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput[RESULTS] = str(self._folder)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when not in ("setup", "call", "teardown"):
            # xdist's own, of a test that took its worker along
            self._notes.append(f"{report.nodeid} ended its process: what it inspected is lost")
            self._outcomes[report.nodeid] = ("failed", 0.0)
            self._note(report)
            return
        if report.when == "setup":
            self._outcomes[report.nodeid] = ("passed", 0.0)
            self._failures.pop(report.nodeid, None)
        outcome, seconds = self._outcomes.get(report.nodeid, ("passed", 0.0))
        if report.when == "call":
            seconds = report.duration
        new = _outcome(report)
        if new != "passed" and outcome != "failed":  # a failing call outweighs its teardown
            outcome = new
        self._outcomes[report.nodeid] = (outcome, seconds)
        self._note(report)
        written = getattr(report, "modelhealth_results", {})
        if "problem" in written:
            self._notes.append(f"{report.nodeid} could not be recorded: {written['problem']}")
        elif written:
            self._ended.pop(report.nodeid, None)  # a test that ran again stands where it ended
            self._ended[report.nodeid] = self._folder / written["file"]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Take notice of what could not be imported, and of modules that are skipped."""
        if report.failed:
            self._outcomes[report.nodeid] = ("error", 0.0)
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        """Keep why a test was skipped, or what failed it first and where, model or none."""
        if report.skipped and isinstance(report.longrepr, tuple):
            self._skipped[report.nodeid] = report.longrepr[2].removeprefix("Skipped: ")
        if not report.failed or report.nodeid in self._failures:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        path, line, _ = report.location or (report.nodeid, 0, "")
        # of a module that cannot be imported there is text alone, with the exception at its end
        said = [text[1:].strip() for text in report.longreprtext.splitlines() if text[:2] == "E "]
        message = getattr(crash, "message", "") or next(reversed(said), report.longreprtext)
        place = f"{crash.path}:{crash.lineno}" if crash is not None else ""
        self._failures[report.nodeid] = {
            "id": report.nodeid,
            "file": path,
            "line": (line or 0) + 1,
            "message": message.partition("\n")[0],
            "raised_at": _shown(place, self._root),
            "replay": next(iter(getattr(report, "modelhealth_replay", ())), ""),
        }
        self._ended.setdefault(report.nodeid, None)

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Take notice of Ctrl-C, `pytest.exit` and what ends a run in the same way."""
        self._why = f"{excinfo.typename} {excinfo.value}".strip()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(
        self, session: pytest.Session, exitstatus: int
    ) -> Generator[None, None, None]:
        """Say that the run ended early; hand it on where pytest shows no summary."""
        wrong = "pytest was called with what it cannot use" * (exitstatus == _WRONG_USE)
        why = self._why or session.shouldfail or session.shouldstop or wrong
        if why or exitstatus == pytest.ExitCode.INTERNAL_ERROR:
            count = f"{len(self._outcomes):,} of {session.testscollected:,} tests ran"
            self._notes.append(f"the run ended early, {count}: {why or 'an internal error'}")
        yield
        terminal: Any = session.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None and not self._is_handed_on:
            self.pytest_terminal_summary(terminal, int(session.exitstatus), session.config)

    def pytest_terminal_summary(
        self,
        terminalreporter: pytest.TerminalReporter,
        exitstatus: int,
        config: pytest.Config,
    ) -> None:
        """Hand the run to each destination; what one raises costs a line."""
        self._is_handed_on = True
        run = self._run(int(exitstatus), identity(config))
        given = {"config": config, "run": run, "terminalreporter": terminalreporter}
        for note in self._notes:
            terminalreporter.write_line(f"modelhealth: {note}")
        for implementation in config.hook.pytest_modelhealth_run_ended.get_hookimpls():
            try:
                implementation.function(*(given[name] for name in implementation.argnames))
            except Exception as error:  # noqa: BLE001 - the run's own result is never lost to it
                terminalreporter.write_line(
                    f"modelhealth: {implementation.plugin_name} failed: "
                    f"{type(error).__name__}: {error}"
                )

    def _run(self, status: int, own: dict[str, str]) -> Run:
        from pytest_modelhealth import __version__

        ended: list[tuple[dict[str, Any], Path | None]] = []
        lost = []
        for name, file in self._ended.items():
            outcome, seconds = self._outcomes[name]
            known = {"outcome": outcome, "seconds": seconds, "raised_at": "", "replay": ""}
            if file is not None and not file.is_file():
                lost.append(name)
            elif file is not None or name in self._failures:
                ended.append((known | self._failures.get(name, {}), file))
        where = f"during the run {self._folder} was deleted, where its results were"
        self._notes += [f"{name} is missing: {where}" for name in lost]
        head = {
            "format": wing("runs.run:FORMAT"),
            "format_version": wing("runs.run:FORMAT_VERSION"),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment": {
                "pytest_modelhealth": __version__,
                "torch": importlib.metadata.version("torch"),
                "python": platform.python_version(),
                "platform": platform.platform(),
            },
            "run": own,
            "exit_status": status,
            "ran": len(self._outcomes),
            "skipped": self._skipped,
            "notes": self._notes,
        }
        is_lost = bool(lost) and not ended
        run: Run = wing("runs.run:Run")(head, _Tests(ended), is_lost)
        return run


def identity(config: pytest.Config) -> dict[str, str]:
    """Return which run this is: command, commit, branch and its page in CI, ``""`` if unknown."""
    known = os.environ.get
    link = known("CI_JOB_URL") or known("BUILD_URL", "")  # of GitLab, of Jenkins
    if number := known("GITHUB_RUN_ID"):
        link = f"{known('GITHUB_SERVER_URL')}/{known('GITHUB_REPOSITORY')}/actions/runs/{number}"
    question = ["git", "-C", str(config.rootpath), "rev-parse", "HEAD", "--abbrev-ref", "HEAD"]
    try:
        told = subprocess.run(question, capture_output=True, text=True, timeout=5, check=False)
        commit, branch = told.stdout.split()
    except (OSError, ValueError, subprocess.SubprocessError):  # no git, no repository, no commit
        commit = branch = ""
    if branch in ("", "HEAD"):  # CI checks out a commit
        names = ("GITHUB_HEAD_REF", "GITHUB_REF_NAME", "CI_COMMIT_REF_NAME", "BRANCH_NAME")
        branch = next(filter(None, map(known, names)), "")
    command = shlex.join(["pytest", *map(str, config.invocation_params.args)])
    return {"command": command, "commit": commit, "branch": branch, "link": link}


def _outcome(report: pytest.TestReport) -> str:
    if hasattr(report, "wasxfail"):
        return "xfailed" if report.skipped else "xpassed"
    return "error" if report.failed and report.when != "call" else report.outcome
