"""Makes one result of what the ranks of a test reported: one report a phase."""

from __future__ import annotations

import copy
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from _pytest._code.code import (
    ExceptionChainRepr,
    ReprEntry,
    ReprFileLocation,
    ReprTraceback,
)

from pytest_modelhealth.plugin.several_ranks.waiting import LIBRARIES

if TYPE_CHECKING:
    from pytest_modelhealth.plugin.several_ranks.processes import Rank

_PHASES = ("setup", "call", "teardown")
_GRAVITY = {"passed": 0, "skipped": 1, "failed": 2}
_ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "; the others did not,",  # an inspection of all ranks, which one of them ended
)
"""What a rank raises because another one has ended."""


@dataclass
class Ran:
    """A test that ran.

    Args:
        ranks: in order, with what each said.
        limit: the seconds that the test may take.
        seconds: how long it took.
        ended: why ranks were ended before they were through: ``"limit"``, ``"grace"`` or nothing.
        folder: where allure's files of the ranks are, if it is asked for.
        grace: how long the others had once a rank failed alone.
    """

    ranks: list[Rank]
    limit: float
    seconds: float
    ended: str
    folder: Path
    grace: float

    def label(self, rank: Rank) -> str:
        """Return ``"rank 1 of 2"``."""
        return f"rank {rank.number} of {len(self.ranks)}"

    def others(self, lead: Rank) -> str:
        """Return a line on what came of each rank but one."""
        return "\n".join(_said(self, rank, lead) for rank in self.ranks if rank is not lead)


def reports(item: pytest.Item, ran: Ran) -> list[pytest.TestReport]:
    """Return the reports of a test: in each phase those of the rank that it failed on.

    Args:
        item: the test, in the process that reports.
        ran: what came of it.
    """
    fault = _fault(item, ran)
    if fault is not None:
        return fault
    made: list[pytest.TestReport] = []
    lead, worst = ran.ranks[0], "passed"
    for phase in _PHASES:
        if phase == "call" and worst != "passed":
            continue
        found, outcome = _leader(ran.ranks, phase)
        if _GRAVITY[outcome] > _GRAVITY[worst]:
            lead, worst = found, outcome
        chosen = found if outcome == "failed" else lead
        made += [_shown(item, ran, chosen, data) for data in chosen.of_phase(phase)]
    return made


def _leader(ranks: list[Rank], phase: str) -> tuple[Rank, str]:
    """Return the rank whose report of a phase stands for all, and its outcome.

    Of those that failed it is the one that failed first, but for echoes, or the first rank that
    says the same: the files of rank 0 are the ones without a suffix.
    """
    present = [rank for rank in ranks if rank.of_phase(phase)]
    if any(_xfailed(rank) for rank in present):  # a strict xfail asks for one rank that fails
        present = [rank for rank in present if not _passed_strictly(rank)]
    outcomes = {rank.number: _outcome(rank, phase) for rank in present}
    worst = max(outcomes.values(), key=_GRAVITY.__getitem__, default="passed")
    like = [rank for rank in present if outcomes[rank.number] == worst]
    if worst == "failed":
        first = min(like, key=lambda rank: (_is_echo(rank.failure), rank.failure.get("stop", 0.0)))
        like = [rank for rank in like if _headline(rank.failure) == _headline(first.failure)]
    return (like or ranks)[0], worst


def _outcome(rank: Rank, phase: str) -> str:
    outcomes = {report["outcome"] for report in rank.of_phase(phase)}
    return next((one for one in ("failed", "skipped") if one in outcomes), "passed")


def _xfailed(rank: Rank) -> bool:
    return any(r["outcome"] == "skipped" and "wasxfail" in r for r in rank.reports)


def _passed_strictly(rank: Rank) -> bool:
    return any(str(r["longrepr"]).startswith("[XPASS(strict)]") for r in rank.reports)


def _is_echo(report: dict[str, Any]) -> bool:
    return any(echo in _headline(report) for echo in _ECHOES)


def _headline(report: dict[str, Any]) -> str:
    shown = report.get("longrepr")
    text = (shown.get("reprcrash") or {}).get("message", "") if isinstance(shown, dict) else shown
    return str(text).strip().partition("\n")[0]


def _shown(item: pytest.Item, ran: Ran, rank: Rank, data: dict[str, Any]) -> pytest.TestReport:
    """Return a report of one rank, a failed one with what the others said."""
    report: pytest.TestReport = item.config.hook.pytest_report_from_serializable(
        config=item.config,
        data=copy.deepcopy(data),  # it is taken apart there
    )
    report.nodeid, report.location = item.nodeid, item.location
    report.modelhealth_rank = rank.number  # type: ignore[attr-defined]
    shown: Any = report.longrepr
    if isinstance(shown, list):  # the place and reason of a skip
        report.longrepr = (shown[0], shown[1], shown[2])
    if not report.failed:
        return report
    if _is_echo(rank.failure):
        place = _place(rank.failure)
        report.longrepr = _text_alone(
            f"{ran.label(rank)}: lost its connection{place}, as others had ended\n\n"
            f"{ran.others(rank)}\n\nA collective waits until all ranks of its group have called "
            f"it. torch said:\n{_headline(rank.failure)}",
            report.location,
        )
    else:
        crash = getattr(report.longrepr, "reprcrash", None)
        if crash is not None:
            crash.message = f"{ran.label(rank)}: {crash.message}"
        also = [str(one.number) for one in ran.ranks if one.failed and one is not rank]
        title = ran.label(rank) + (f"; also failed: {', '.join(also)}" if also else "")
        _add(report, title, ran.others(rank))
    _hint_at_debugger(item, report)
    return report


def _add(report: pytest.TestReport, title: str, text: str) -> None:
    """Add a section to what is shown of a failure, whatever of its output is hidden."""
    shown: Any = report.longrepr
    if hasattr(shown, "addsection"):
        shown.addsection(title, text)
    else:
        report.longrepr = f"{shown}\n\n{title}\n{text}"


def _said(ran: Ran, rank: Rank, lead: Rank) -> str:
    """Return a line on what came of another rank."""
    return f"rank {rank.number}: {_fate(ran, rank, lead)}"


def _fate(ran: Ran, rank: Rank, lead: Rank) -> str:
    if rank.where is not None:
        after = f"{ran.grace:g} s after rank {lead.number}'s end"
        when = "the time limit" if ran.ended == "limit" else after
        return f"still {rank.where['where']} at {when}, and ended then"
    if rank.code is None:
        return "ended; it did not say where it was"
    if not rank.finished:
        return _how_it_ended(rank.code)
    if rank.problems:
        return rank.problems[0].strip().splitlines()[-1]
    headline, place = _headline(rank.failure), _place(rank.failure)
    if not rank.failure:
        is_skipped = any(report["outcome"] == "skipped" for report in rank.reports)
        return "xfailed" if _xfailed(rank) else "skipped" if is_skipped else "passed"
    if headline == _headline(lead.failure):
        return "the same"
    if _is_echo(rank.failure):
        return f"lost its connection{place}, as rank {lead.number} had ended"
    return f"{headline}{place}"


def _place(failure: dict[str, Any]) -> str:
    """Return `` at test_net.py:20``, the innermost line that is of no installed library."""
    shown = failure.get("longrepr")
    entries = shown["reprtraceback"]["reprentries"] if isinstance(shown, dict) else []
    for entry in reversed(entries):
        place = entry["data"].get("reprfileloc") or {}
        path = str(place.get("path", "")).replace("\\", "/")
        if path and not any(library in path for library in LIBRARIES):
            return f" at {path.rpartition('/')[2]}:{place['lineno']}"
    return ""


def _how_it_ended(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _fault(item: pytest.Item, ran: Ran) -> list[pytest.TestReport] | None:
    """Return the reports of this process, where a rank has none of what went wrong with it.

    There may be no file of any destination of that rank.
    """
    crashed = [rank for rank in ran.ranks if rank.code is not None and not rank.finished]
    told = next((rank for rank in ran.ranks if rank.problems), None)
    if told is not None:
        rank, phase, why = told, "setup", told.problems[0].strip()
    elif crashed:
        rank = crashed[0]
        phase, why = _phase_of(rank), _how_it_ended(rank.code or 0)
    elif ran.ended == "limit" and not any(rank.failed for rank in ran.ranks):
        rank = next(rank for rank in ran.ranks if rank.code is None)
        phase, why = min(map(_phase_of, ran.ranks), key=_PHASES.index), ""
    else:
        return None
    text = _over_limit(ran)
    if why:
        text = "\n".join([f"{ran.label(rank)}: {why}", "", ran.others(rank), *_printed(rank)])
    made = [r for before in _PHASES[: _PHASES.index(phase)] for r in made_here(item, before)]
    for report in made:
        for said in rank.of_phase(str(report.when)):
            report.sections += said["sections"]
    made.append(failed(item, phase, text, ran.seconds))
    return made if phase == "teardown" else [*made, *made_here(item, "teardown")]


def _phase_of(rank: Rank) -> str:
    """Return the phase that a rank was in when it ended."""
    return next((phase for phase in _PHASES if not rank.of_phase(phase)), "teardown")


def _printed(rank: Rank) -> list[str]:
    """Return what a rank had printed when it ended, and where faulthandler saw it."""
    lines = [
        line
        for line in rank.log.splitlines()
        if not line.startswith("Extension modules:")
        and not (line.startswith('  File "') and any(part in line for part in _BELOW_THE_TEST))
    ]
    return ["", f"printed by rank {rank.number}:", *lines] if lines else []


_BELOW_THE_TEST = ("/_pytest/", "/pluggy/", "several_ranks", "/threading.py", '"<string>"')


def _over_limit(ran: Ran) -> str:
    """Return who waits where, and the stacks of all."""
    where, lines = [], []
    for rank in ran.ranks:
        if rank.where is not None:
            where.append(f"rank {rank.number} {rank.where['where']}")
            lines += ["", f"rank {rank.number}, the innermost call last:", rank.where["stack"]]
        elif rank.code is None:
            where.append(f"rank {rank.number} in native code")
            lines += ["", f"rank {rank.number} did not answer: it keeps the interpreter to itself"]
        else:
            where.append(f"rank {rank.number} was through")
        lines += _printed(rank)
    head = (
        f"took longer than {ran.limit:g} s: {'; '.join(where)}\n\n"
        f"The limit: @pytest.mark.modelhealth_ranks({len(ran.ranks)}, seconds=...), or that of "
        "pytest-timeout."
    )
    return "\n".join([head, *lines])


def failed(item: pytest.Item, phase: Any, text: str, seconds: float = 0.0) -> pytest.TestReport:
    """Return the report of a failure in this process, shown as the text alone."""
    (report,) = made_here(item, phase, lambda: pytest.fail(text, pytrace=False))
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


def made_here(
    item: pytest.Item, phase: Any, act: Callable[[], object] | None = None
) -> list[pytest.TestReport]:
    """Return the report of a phase in this process; none where `act` does and ends well."""
    ends = (KeyboardInterrupt, pytest.exit.Exception)
    call = pytest.CallInfo.from_call(act or (lambda: None), when=phase, reraise=ends)
    if act is not None and call.excinfo is None:
        return []
    return [item.ihook.pytest_runtest_makereport(item=item, call=call)]


def _hint_at_debugger(item: pytest.Item, report: pytest.TestReport) -> None:
    if item.config.getoption("usepdb", False):
        _add(
            report,
            "--pdb",
            "no debugger was started: each rank is a process of its own, without a terminal. "
            "Under torchrun, the test runs in the processes that it started:\n"
            f"torchrun --nproc-per-node N -m pytest {item.nodeid}",
        )


def warn(item: pytest.Item, ranks: list[Rank]) -> None:
    """Record the warnings of all ranks, each once."""
    seen = {tuple(map(str, one.values())): one for rank in ranks for one in rank.warnings}
    for one in seen.values():
        module, name = one["category"]
        category = getattr(sys.modules.get(module), name, UserWarning)
        try:
            raised = category(one["text"])
        except TypeError:  # its class takes more than a text
            category, raised = UserWarning, UserWarning(one["text"])
        message = warnings.WarningMessage(raised, category, one["file"], one["line"])
        item.ihook.pytest_warning_recorded.call_historic(
            kwargs={
                "warning_message": message,
                "when": "runtest",
                "nodeid": item.nodeid,
                "location": one["location"],
            }
        )
