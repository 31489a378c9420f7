"""Makes one result of what the ranks of a test reported: that of the rank which failed, if any."""

from __future__ import annotations

import copy
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pytest_modelhealth.plugin.several_ranks.running import Rank

GRACE = 5.0
"""Seconds that the others have once a rank failed alone: most end by themselves as its connection
closes, those that wait elsewhere would wait for ever."""

_PHASES = ("setup", "call", "teardown")
_ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "; the others did not,",  # an inspection of all ranks, which one of them ended
)
"""What a rank raises because another one has ended."""

_LIBRARIES = ("/site-packages/", "/dist-packages/", "<", f"{Path(os.__file__).parent}/")
_OURS = f"{Path(__file__).parents[2]}/"
_LEFT_OUT = (
    "/_pytest/",
    "/pluggy/",
    "several_ranks",
    '"<string>"',
    "multiprocessing",
    "_call_impl",
)
"""What of a line of a stack is of no interest."""
_COLLECTIVES = ("/distributed_c10d.py", "/_functional_collectives.py")
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (\S+)', re.MULTILINE)


@dataclass
class Ran:
    """A test that ran.

    Args:
        ranks: in order, with what each said.
        limit: the seconds that the test may take.
        ended: why ranks were ended before they were through: ``"limit"``, ``"grace"`` or nothing.
    """

    ranks: list[Rank]
    limit: float
    ended: str

    def label(self, rank: Rank) -> str:
        """Return ``"rank 1 of 2"``."""
        return f"rank {rank.number} of {len(self.ranks)}"

    def others(self, lead: Rank) -> str:
        """Return a line on what came of each rank but one."""
        fates = [(one, _fate(self, one, lead)) for one in self.ranks if one is not lead]
        return "\n".join(f"rank {rank.number}: {fate}" for rank, fate in fates)


def reports(item: pytest.Item, ran: Ran) -> list[pytest.TestReport]:
    """Return the reports of a test: those of the rank that says most.

    Args:
        item: the test, in the process that reports.
        ran: what came of it.
    """
    lead = _lead(ran.ranks)
    shown = [_shown(item, ran, lead, data) for data in lead.reports]
    if lead.problems:
        why = f"{ran.label(lead)}: {lead.problems[0].strip()}\n\n{ran.others(lead)}"
    elif lead.crashed:
        why = f"{ran.label(lead)}: {_how_it_ended(lead.code or 0)}\n\n{ran.others(lead)}"
        why += _printed(lead)
    elif lead.code is None and not lead.failure:
        why = _over_limit(ran)
    else:
        return shown
    phase = next((phase for phase in _PHASES if not lead.of_phase(phase)), "teardown")
    shown.append(failed(item, phase, why))
    return shown if phase == "teardown" else [*shown, *made_here(item, "teardown")]


def _lead(ranks: list[Rank]) -> Rank:
    """Return the rank that stands for all.

    Of those that failed it is the one that failed first, or the first rank that says the same: the
    files of rank 0 are the ones without a suffix.
    """
    worst = max(map(_gravity, ranks))
    like = [rank for rank in ranks if _gravity(rank) == worst]
    first = min(like, key=lambda rank: rank.failure.get("stop", 0.0))
    return next(r for r in like if _headline(r.failure) == _headline(first.failure))


def _gravity(rank: Rank) -> int:
    if rank.problems or rank.crashed:
        return 7 if rank.problems else 6
    if rank.failure and not str(rank.failure["longrepr"]).startswith("[XPASS(strict)]"):
        return 4 if _is_echo(rank.failure) else 5
    if rank.code is None:
        return 3
    if rank.failure:  # a strict xfail asks for one rank that fails
        return 1
    outcomes = [report["outcome"] for report in rank.reports]
    return (2 if _xfailed(rank) else 1) if "skipped" in outcomes else 0


def _xfailed(rank: Rank) -> bool:
    return any(r["outcome"] == "skipped" and "wasxfail" in r for r in rank.reports)


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
    shown: Any = report.longrepr
    if isinstance(shown, list):  # the place and reason of a skip
        report.longrepr = (shown[0], shown[1], shown[2])
    if not report.failed:
        return report
    if _is_echo(rank.failure):
        text = (
            f"{ran.label(rank)}: lost its connection{_place(rank.failure)}, as others had ended\n\n"
            f"{ran.others(rank)}\n\nA collective waits until all ranks of its group have called "
            f"it. torch said:\n{_headline(rank.failure)}"
        )
        report.longrepr = failed(item, report.when, text).longrepr
        return report
    also = [str(one.number) for one in ran.ranks if one.failed and one is not rank]
    title = ran.label(rank) + (f"; also failed: {', '.join(also)}" if also else "")
    if hasattr(shown, "addsection"):
        if shown.reprcrash is not None:
            shown.reprcrash.message = f"{ran.label(rank)}: {shown.reprcrash.message}"
        shown.addsection(title, ran.others(rank))
    else:
        report.longrepr = f"{shown}\n\n{title}\n{ran.others(rank)}"
    return report


def _fate(ran: Ran, rank: Rank, lead: Rank) -> str:
    """Return what came of another rank."""
    if rank.code is None:
        after = f"{GRACE:g} s after rank {lead.number}'s end"
        when = "the time limit" if ran.ended == "limit" else after
        return f"still {_where(rank)} at {when}, and ended then"
    if rank.crashed:
        return _how_it_ended(rank.code)
    if rank.problems:
        return rank.problems[0].strip().splitlines()[-1]
    if not rank.failure:
        is_skipped = any(report["outcome"] == "skipped" for report in rank.reports)
        return "xfailed" if _xfailed(rank) else "skipped" if is_skipped else "passed"
    headline, place = _headline(rank.failure), _place(rank.failure)
    if headline == _headline(lead.failure):
        return "the same"
    if _is_echo(rank.failure):
        return f"lost its connection{place}, as rank {lead.number} had ended"
    return f"{headline}{place}"


def _is_users(path: str) -> bool:
    """Whether a file is of the test or the model, and no library's."""
    return not any(part in path for part in _LIBRARIES) and not path.startswith(_OURS)


def _place(failure: dict[str, Any]) -> str:
    """Return `` at test_net.py:20``, the innermost line that is of no installed library."""
    shown = failure.get("longrepr")
    entries = shown["reprtraceback"]["reprentries"] if isinstance(shown, dict) else []
    for entry in reversed(entries):
        place = entry["data"].get("reprfileloc") or {}
        path = str(place.get("path", "")).replace("\\", "/")
        if path and _is_users(path):
            return f" at {path.rpartition('/')[2]}:{place['lineno']}"
    return ""


def _where(rank: Rank) -> str:
    """Return ``"waiting in all_gather at train.py:20"``, from the stack that it was asked for."""
    stack = rank.log().rpartition("Stack (most recent call first)")[2]
    frames = [found.groups() for found in _FRAME.finditer(stack)]
    collective = next((name for path, _, name in frames if path.endswith(_COLLECTIVES)), "")
    waits = f"waiting in {collective} " if collective else ""
    for path, line, _ in frames:
        if _is_users(path):
            return f"{waits}at {Path(path).name}:{line}"
    return waits.rstrip() or "not in the test"


def _how_it_ended(code: int) -> str:
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _printed(rank: Rank) -> str:
    """Return what is in the log of a rank: what it printed, and its stack from the test on."""
    lines = [
        line
        for line in rank.log().splitlines()
        if not line.startswith("Extension modules:")
        and not (line.startswith('  File "') and any(part in line for part in _LEFT_OUT))
    ]
    return "\n".join(["", "", f"rank {rank.number}:", *lines]) if lines else ""


def _over_limit(ran: Ran) -> str:
    """Return who waits where, and the stacks of all."""
    where = "; ".join(
        f"rank {rank.number} {_where(rank) if rank.code is None else 'was through'}"
        for rank in ran.ranks
    )
    return (
        f"took longer than {ran.limit:g} s: {where}\n\n"
        f"The limit: @pytest.mark.modelhealth_ranks({len(ran.ranks)}, seconds=...), or that of "
        f"pytest-timeout.{''.join(_printed(rank) for rank in ran.ranks)}"
    )


def failed(item: pytest.Item, phase: Any, text: str) -> pytest.TestReport:
    """Return the report of a failure in this process, shown as the text alone."""
    (report,) = made_here(item, phase, lambda: pytest.fail(text, pytrace=False))
    return report


def made_here(
    item: pytest.Item, phase: Any, act: Callable[[], object] | None = None
) -> list[pytest.TestReport]:
    """Return the report of a phase in this process; none where `act` does and ends well."""
    ends = (KeyboardInterrupt, pytest.exit.Exception)
    call = pytest.CallInfo.from_call(act or (lambda: None), when=phase, reraise=ends)
    if act is not None and call.excinfo is None:
        return []
    return [item.ihook.pytest_runtest_makereport(item=item, call=call)]


def warn(item: pytest.Item, ranks: list[Rank]) -> None:
    """Record the warnings of all ranks, each once."""
    for text, kind, file, line in {repr(one): one for r in ranks for one in r.warnings}.values():
        category = getattr(sys.modules.get(kind[0]), kind[1], UserWarning)
        message = warnings.WarningMessage(text, category, file, line)
        item.ihook.pytest_warning_recorded.call_historic(
            kwargs={
                "warning_message": message,
                "when": "runtest",
                "nodeid": item.nodeid,
                "location": None,
            }
        )
