"""Makes one result of what the ranks of a test reported: one report a phase."""

from __future__ import annotations

import copy
import signal
import sys
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from _pytest._code.code import (
    ExceptionChainRepr,
    ReprEntry,
    ReprFileLocation,
    ReprTraceback,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from pytest_modelhealth.plugin.several_ranks import Wanted

_PHASES = ("setup", "call", "teardown")
_ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "; the others did not,",  # an inspection of all ranks, which one of them ended
)
"""What a rank raises because another one has ended."""


@dataclass
class Told:
    """What one rank said until it ended.

    Args:
        rank: which.
        reports: one a phase, and more of subtests, as pytest serialises them.
        warnings: those of the test.
        problems: why it could not run the test.
        used: comparisons with snapshots.
        exit: what ``pytest.exit`` was called with.
        finished: whether it came to its end.
        code: its exit code, if it ended by itself.
        where: what it did when it was asked: ``"where"`` and ``"stack"``.
        log: what it and its libraries printed outside of pytest's capture.
    """

    rank: int
    reports: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    used: list[dict[str, Any]] = field(default_factory=list)
    exit: dict[str, Any] | None = None
    finished: bool = False
    code: int | None = None
    where: dict[str, str] | None = None
    log: str = ""

    def take(self, message: dict[str, Any]) -> None:
        """Add a message."""
        kind = message.pop("kind")
        if kind == "report":
            self.reports.append(message["data"])
        elif kind == "warning":
            self.warnings.append(message)
        elif kind == "problem":
            self.problems.append(message["text"])
        elif kind == "snapshots":
            self.used = message["used"]
        elif kind == "exit":
            self.exit = message
        elif kind == "where":
            self.where = message
        else:
            self.finished = True

    @property
    def failed(self) -> bool:
        """Whether something went wrong on it so far."""
        crashed = self.code is not None and not self.finished
        return crashed or bool(self.problems) or any(r["outcome"] == "failed" for r in self.reports)


@dataclass
class Ran:
    """A test that ran.

    Args:
        told: what each rank said, in order.
        wanted: what the mark asked for.
        seconds: how long it took.
        ended: why ranks were ended before they were through: ``"limit"``, ``"grace"`` or nothing.
        folder: where allure's files of the ranks are, if it is asked for.
        grace: how long the others had once a rank failed alone.
    """

    told: list[Told]
    wanted: Wanted
    seconds: float
    ended: str
    folder: Path
    grace: float


class _Fault(NamedTuple):
    """A failure of a rank that gave no report of it."""

    phase: str
    rank: int
    text: str


def reports(item: pytest.Item, ran: Ran) -> list[pytest.TestReport]:
    """Return the reports of a test: in each phase those of the rank that it failed on.

    Args:
        item: the test, in the process that reports.
        ran: what came of it.
    """
    fault = _fault(item, ran)
    if fault is not None:
        return _reports_of_fault(item, ran, fault)
    made: list[pytest.TestReport] = []
    lead, worst = 0, "passed"
    for phase in _PHASES:
        if phase == "call" and worst != "passed":
            continue
        found = _leader(ran, phase)
        if found is not None and _GRAVITY[found[1]] > _GRAVITY[worst]:
            lead, worst = found
        chosen = lead if found is None or found[1] != "failed" else found[0]
        phase_reports = _of_phase(ran.told[chosen], phase)
        made += _shown(item, ran, chosen, phase_reports)
    return made


_GRAVITY = {"passed": 0, "skipped": 1, "failed": 2}


def _of_phase(told: Told, phase: str) -> list[dict[str, Any]]:
    return [report for report in told.reports if report["when"] == phase]


def _outcome(told: Told, phase: str) -> str:
    outcomes = [str(report["outcome"]) for report in _of_phase(told, phase)]
    return max(outcomes, key=lambda outcome: _GRAVITY.get(outcome, 0), default="passed")


def _leader(ran: Ran, phase: str) -> tuple[int, str] | None:
    """Return the rank whose report of a phase stands for all, and its outcome.

    Of those that failed it is the one that failed first, but for echoes; rank 0 where it says the
    same, as its files are the ones without a suffix.
    """
    present = [told for told in ran.told if _of_phase(told, phase)]
    if not present:
        return None
    if any(_failed_as_known(told) for told in present):
        present = [told for told in present if not _passed_strictly(told)]
    outcome = max((_outcome(told, phase) for told in present), key=_GRAVITY.__getitem__)
    like = [told for told in present if _outcome(told, phase) == outcome]
    if outcome == "failed":
        like.sort(key=lambda told: (_is_echo(_failure(told)), _failure(told).get("stop", 0.0)))
        said = _headline(_failure(like[0]))
        like.sort(key=lambda told: _headline(_failure(told)) != said)  # ... and keeps that order
        like = [told for told in like if told.rank == 0 and _same(told, said)] or like
    return like[0].rank, outcome


def _failed_as_known(told: Told) -> bool:
    return any(r["outcome"] == "skipped" and "wasxfail" in r for r in told.reports)


def _passed_strictly(told: Told) -> bool:
    """Whether a rank passed where a strict xfail wants it to fail: one that does is enough."""
    return any(str(r["longrepr"]).startswith("[XPASS(strict)]") for r in told.reports)


def _same(told: Told, headline: str) -> bool:
    return _headline(_failure(told)) == headline


def _failure(told: Told) -> dict[str, Any]:
    """Return the first failed report of a rank."""
    return next((report for report in told.reports if report["outcome"] == "failed"), {})


def _is_echo(report: dict[str, Any]) -> bool:
    text = _headline(report)
    return any(echo in text for echo in _ECHOES)


def _crash(report: dict[str, Any]) -> dict[str, Any]:
    shown = report.get("longrepr")
    return (shown.get("reprcrash") or {}) if isinstance(shown, dict) else {}


def _headline(report: dict[str, Any]) -> str:
    shown = report.get("longrepr")
    text = shown if isinstance(shown, str) else str(_crash(report).get("message", ""))
    return text.strip().partition("\n")[0]


def _shown(
    item: pytest.Item, ran: Ran, rank: int, chosen: list[dict[str, Any]]
) -> Iterator[pytest.TestReport]:
    """Yield the reports of one rank, the failed ones with what the others said."""
    for data in chosen:
        report: pytest.TestReport = item.config.hook.pytest_report_from_serializable(
            config=item.config,
            data=copy.deepcopy(data),  # it is taken apart there
        )
        report.nodeid, report.location = item.nodeid, item.location
        report.modelhealth_rank = rank  # type: ignore[attr-defined]
        if report.failed:
            _tell_rank(report, ran, rank)
            _hint_at_debugger(item, report)
        yield report


def _tell_rank(report: pytest.TestReport, ran: Ran, rank: int) -> None:
    others = "\n".join(_said(ran, told, rank) for told in ran.told if told.rank != rank)
    failure = _failure(ran.told[rank])
    if _is_echo(failure):
        said = f"{_label(ran, rank)}: lost its connection{_place(failure)}, as others had ended"
        text = f"{said}\n\n{others}\n\n{_EACH_OF_ALL}\n{_headline(failure)}"
        report.longrepr = _text_alone(text, report.location)
        return
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        crash.message = f"{_label(ran, rank)}: {crash.message}"
    _add(report, _title(ran, rank), others)


_EACH_OF_ALL = "A collective waits until all ranks of its group have called it. torch said:"


def _add(report: pytest.TestReport, title: str, text: str) -> None:
    """Add a section to what is shown of a failure, whatever of its output is hidden."""
    shown: Any = report.longrepr
    if hasattr(shown, "addsection"):
        shown.addsection(title, text)
    else:
        report.longrepr = f"{shown}\n\n{title}\n{text}"


def _label(ran: Ran, rank: int) -> str:
    return f"rank {rank} of {len(ran.told)}"


def _title(ran: Ran, rank: int) -> str:
    others = [str(told.rank) for told in ran.told if told.failed and told.rank != rank]
    return _label(ran, rank) + (f"; also failed: {', '.join(others)}" if others else "")


def _said(ran: Ran, told: Told, lead: int) -> str:
    """Return a line on what came of another rank."""
    start = f"rank {told.rank}:"
    if told.where is not None:
        when = (
            "the time limit" if ran.ended == "limit" else f"{ran.grace:g} s after rank {lead}'s end"
        )
        return f"{start} still {told.where['where']} at {when}, and ended then"
    if told.code is None:
        return f"{start} ended; it did not say where it was"
    if not told.finished:
        return f"{start} {_how_it_ended(told.code)}"
    if told.problems:
        return f"{start} {told.problems[0].strip().splitlines()[-1]}"
    failure = _failure(told)
    if not failure:
        return f"{start} {_how_it_went(told)}"
    headline = _headline(failure)
    if headline == _headline(_failure(ran.told[lead])):
        return f"{start} the same"
    place = _place(failure)
    if _is_echo(failure):
        return f"{start} lost its connection{place}, as rank {lead} had ended"
    return f"{start} {headline}{place}"


def _how_it_went(told: Told) -> str:
    if _failed_as_known(told):
        return "xfailed"
    return "skipped" if any(report["outcome"] == "skipped" for report in told.reports) else "passed"


def _place(failure: dict[str, Any]) -> str:
    """Return `` at test_net.py:20``, the innermost line that is of no installed library."""
    shown = failure.get("longrepr")
    entries = shown["reprtraceback"]["reprentries"] if isinstance(shown, dict) else []
    places = [(entry["data"].get("reprfileloc") or {}) for entry in entries]
    for place in reversed(places):
        path = str(place.get("path", "")).replace("\\", "/")
        if path and not any(library in path for library in _LIBRARIES):
            return f" at {path.rpartition('/')[2]}:{place['lineno']}"
    return ""


_LIBRARIES = ("/site-packages/", "/dist-packages/")


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"
    return f"ended with exit code {code}"


def _fault(item: pytest.Item, ran: Ran) -> _Fault | None:
    """Return what went wrong with a rank that has no report of it."""
    for told in ran.told:
        if told.problems:
            text = f"{_label(ran, told.rank)}: {told.problems[0].strip()}"
            return _Fault("setup", told.rank, _with_others(ran, told.rank, text))
    crashed = [told for told in ran.told if told.code is not None and not told.finished]
    if crashed:
        told = crashed[0]
        text = f"{_label(ran, told.rank)}: {_how_it_ended(told.code)}"
        return _Fault(_phase_of(told), told.rank, _with_others(ran, told.rank, text))
    if ran.ended == "limit" and not any(told.failed for told in ran.told):
        told = next(told for told in ran.told if told.code is None)
        phases = [_phase_of(told) for told in ran.told]
        return _Fault(min(phases, key=_PHASES.index), told.rank, _over_limit(item, ran))
    return None


def _phase_of(told: Told) -> str:
    """Return the phase that a rank was in when it ended."""
    done = {report["when"] for report in told.reports}
    return next((phase for phase in _PHASES if phase not in done), "teardown")


def _with_others(ran: Ran, lead: int, text: str) -> str:
    others = [_said(ran, told, lead) for told in ran.told if told.rank != lead]
    return "\n".join([text, "", *others, *_printed(ran.told[lead])])


def _printed(told: Told) -> list[str]:
    """Return what a rank had printed when it ended, and where faulthandler saw it."""
    lines = []
    for line in told.log.splitlines():
        if line.startswith("Extension modules:"):
            continue
        if not line.startswith('  File "') or not any(part in line for part in _BELOW_THE_TEST):
            lines.append(line)
    return ["", f"printed by rank {told.rank}:", *lines] if lines else []


_BELOW_THE_TEST = ("/_pytest/", "/pluggy/", "several_ranks", "/threading.py", '"<string>"')


def _over_limit(item: pytest.Item, ran: Ran) -> str:
    """Return who waits where, and the stacks of all."""
    where = [_where(told) for told in ran.told]
    lines = [
        f"took longer than {ran.wanted.seconds:g} s: {'; '.join(where)}",
        "",
        (
            f"The limit: @pytest.mark.modelhealth_ranks({len(ran.told)}, seconds=...), or that of "
            "pytest-timeout."
        ),
    ]
    for told in ran.told:
        if told.where is not None:
            lines += ["", f"rank {told.rank}, the innermost call last:", told.where["stack"]]
        elif told.code is None:
            lines += ["", f"rank {told.rank} did not answer: it keeps the interpreter to itself"]
        lines += _printed(told)
    return "\n".join(lines)


def _where(told: Told) -> str:
    if told.where is not None:
        return f"rank {told.rank} {told.where['where']}"
    if told.code is None:
        return f"rank {told.rank} in native code"
    return f"rank {told.rank} was through"


def _reports_of_fault(item: pytest.Item, ran: Ran, fault: _Fault) -> list[pytest.TestReport]:
    """Return reports of this process: of the rank there may be no file of any destination."""
    made = [_passed(item, phase) for phase in _PHASES[: _PHASES.index(fault.phase)]]
    for report in made:
        for said in _of_phase(ran.told[fault.rank], str(report.when)):
            report.sections += said["sections"]
    made.append(failed(item, fault.phase, fault.text, ran.seconds))
    if fault.phase != "teardown":
        made.append(_passed(item, "teardown"))
    return made


def failed(item: pytest.Item, phase: Any, text: str, seconds: float = 0.0) -> pytest.TestReport:
    """Return the report of a failure in this process, shown as the text alone."""
    call = pytest.CallInfo.from_call(lambda: pytest.fail(text, pytrace=False), when=phase)
    report: pytest.TestReport = item.ihook.pytest_runtest_makereport(item=item, call=call)
    report.longrepr = _text_alone(text, item.location)
    report.duration = seconds
    _hint_at_debugger(item, report)
    return report


def _text_alone(text: str, location: tuple[str, int | None, str]) -> ExceptionChainRepr:
    """Return what pytest shows of a failure, with a text in place of a traceback."""
    path, line, name = location
    lines = [f"E   {text_line}".rstrip() for text_line in text.splitlines()]
    place = ReprFileLocation(path, (line or 0) + 1, name)
    entry = ReprEntry(lines, None, None, place, "long")
    crash = ReprFileLocation(path, (line or 0) + 1, text.partition("\n")[0])
    return ExceptionChainRepr([(ReprTraceback([entry], None, style="long"), crash, None)])


def _passed(item: pytest.Item, phase: Any) -> pytest.TestReport:
    call = pytest.CallInfo.from_call(lambda: None, when=phase)
    report: pytest.TestReport = item.ihook.pytest_runtest_makereport(item=item, call=call)
    return report


def _hint_at_debugger(item: pytest.Item, report: pytest.TestReport) -> None:
    if item.config.getoption("usepdb", False):
        _add(
            report,
            "--pdb",
            "no debugger was started: each rank is a process of its own, without a terminal. "
            "Under torchrun, the test runs in the processes that it started:\n"
            f"torchrun --nproc-per-node N -m pytest {item.nodeid}",
        )


def warn(item: pytest.Item, told: Iterable[Told]) -> None:
    """Record the warnings of all ranks, each once."""
    seen = set()
    for one in (warning for rank in told for warning in rank.warnings):
        key = (one["category"], one["text"], one["file"], one["line"])
        if key in seen:
            continue
        seen.add(key)
        category = _category(*one["category"])
        message = warnings.WarningMessage(category(one["text"]), category, one["file"], one["line"])
        item.ihook.pytest_warning_recorded.call_historic(
            kwargs={
                "warning_message": message,
                "when": "runtest",
                "nodeid": item.nodeid,
                "location": one["location"],
            }
        )


def _category(module: str, name: str) -> type[Warning]:
    try:
        found: Any = getattr(sys.modules[module], name)
        found("")
    except Exception:  # noqa: BLE001 - it is unknown here, or takes more than a text
        return UserWarning
    return found if issubclass(found, Warning) else UserWarning
