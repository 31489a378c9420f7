"""Makes one result of what the ranks of a test reported: that of the rank which failed, if any."""

from __future__ import annotations

import copy
import os
import re
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pytest_modelhealth.plugin.several_ranks.processes import Rank

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
_COLLECTIVES = ("/distributed_c10d.py", "/_functional_collectives.py")
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in (\S+)', re.MULTILINE)


def reports(item: pytest.Item, ranks: list[Rank], limit: float) -> list[pytest.TestReport]:
    """Return the reports of a test: those of the rank that says most."""
    worst = max(map(_gravity, ranks))
    like = [rank for rank in ranks if _gravity(rank) == worst]
    # it failed first, or is the first rank that says the same: files of rank 0 have no suffix
    first = min(like, key=lambda rank: rank.failure.get("stop", 0.0))
    lead = next(r for r in like if _headline(r.failure) == _headline(first.failure))
    shown = [_shown(item, ranks, lead, data) for data in lead.reports]
    is_stuck = lead.code is None and not lead.failure
    if not (lead.problems or lead.crashed or is_stuck):
        return shown
    why = f"rank {lead.number} of {len(ranks)}: {_fate(lead)}\n\n{_others(ranks, lead)}"
    if is_stuck and not lead.problems:
        each = "; ".join(f"rank {rank.number} {_fate(rank)}" for rank in ranks)
        why = f"took longer than {limit:g} s: {each}\n\nThe limit: @pytest.mark.modelhealth_ranks("
        why += f"{len(ranks)}, seconds=...), or that of pytest-timeout."
    done = {report["when"] for report in lead.reports}
    phase = next((phase for phase in ("setup", "call") if phase not in done), "teardown")
    text = "\n\n".join([why, *(rank.said() for rank in ranks if rank.crashed or rank.code is None)])
    shown.append(failed(item, phase, text))
    return shown if phase == "teardown" else [*shown, *made_here(item, "teardown")]


def _gravity(rank: Rank) -> int:
    if rank.problems or rank.crashed:
        return 6
    if rank.failure and not str(rank.failure["longrepr"]).startswith("[XPASS(strict)]"):
        return 4 if _is_echo(rank.failure) else 5
    if rank.code is None:
        return 3
    if rank.failure:  # a strict xfail asks for one rank that fails
        return 1
    is_xfailed = any(r["outcome"] == "skipped" and "wasxfail" in r for r in rank.reports)
    return 2 if is_xfailed else int(any(r["outcome"] == "skipped" for r in rank.reports))


def _is_echo(failure: dict[str, Any]) -> bool:
    return any(echo in _headline(failure) for echo in _ECHOES)


def _headline(failure: dict[str, Any]) -> str:
    shown = failure.get("longrepr")
    text = (shown.get("reprcrash") or {}).get("message", "") if isinstance(shown, dict) else shown
    return str(text).strip().partition("\n")[0]


def _shown(
    item: pytest.Item, ranks: list[Rank], rank: Rank, data: dict[str, Any]
) -> pytest.TestReport:
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
    title, others = f"rank {rank.number} of {len(ranks)}", _others(ranks, rank)
    if _is_echo(rank.failure):
        others += "\nA collective waits until all ranks of its group have called it."
    if hasattr(shown, "addsection"):
        if shown.reprcrash is not None:
            said = _fate(rank) if _is_echo(rank.failure) else shown.reprcrash.message
            shown.reprcrash.message = f"{title}: {said}"
        shown.addsection(title, others)
    else:
        report.longrepr = f"{shown}\n\n{title}\n{others}"
    return report


def _others(ranks: list[Rank], lead: Rank) -> str:
    """Return a line on what came of each rank but one."""
    fates = {one.number: _fate(one).rpartition("\n")[2] for one in ranks if one is not lead}
    return "\n".join(f"rank {number}: {fate}" for number, fate in fates.items())


def _fate(rank: Rank) -> str:
    """Return what came of a rank."""
    if rank.problems:
        return rank.problems[0].strip()
    if rank.crashed:
        code = rank.code or 0
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    if rank.failure:
        told = "lost its connection" if _is_echo(rank.failure) else _headline(rank.failure)
        return f"{told}{_place(rank.failure)}"
    if rank.code is None:
        return _where(rank)
    return "skipped" if any(r["outcome"] == "skipped" for r in rank.reports) else "passed"


def _is_users(path: str) -> bool:
    """Whether a file is of the test or the model, and no library's."""
    return not any(part in path for part in _LIBRARIES) and not path.startswith(_OURS)


def _place(failure: dict[str, Any]) -> str:
    """Return `` at test_net.py:20``, the innermost line that is of no installed library."""
    shown = failure.get("longrepr")
    entries = shown["reprtraceback"]["reprentries"] if isinstance(shown, dict) else []
    places = (entry["data"].get("reprfileloc") for entry in reversed(entries))
    users = (place for place in places if place and _is_users(place["path"]))
    return next((f" at {Path(place['path']).name}:{place['lineno']}" for place in users), "")


def _where(rank: Rank) -> str:
    """Return ``"waiting in all_gather at train.py:20"``, from the stack that it was asked for."""
    stack = rank.log().rpartition("Stack (most recent call first)")[2]
    frames = [found.groups() for found in _FRAME.finditer(stack)]
    collective = next((name for path, _, name in frames if path.endswith(_COLLECTIVES)), "")
    waits = f"waiting in {collective} " if collective else ""
    places = (f"at {Path(path).name}:{line}" for path, line, _ in frames if _is_users(path))
    return f"{waits}{next(places, 'outside of the test')}"


def failed(item: pytest.Item, phase: Any, text: str) -> pytest.TestReport:
    """Return the report of a failure in this process, shown as the text alone."""
    return made_here(item, phase, lambda: pytest.fail(text, pytrace=False))[0]


def made_here(
    item: pytest.Item, phase: Any, act: Callable[[], object] | None = None
) -> list[pytest.TestReport]:
    """Return the report of a phase in this process; none where `act` does and ends well."""
    ends = (KeyboardInterrupt, pytest.exit.Exception)
    call = pytest.CallInfo.from_call(act or (lambda: None), when=phase, reraise=ends)
    if act is not None and call.excinfo is None:
        return []
    return [item.ihook.pytest_runtest_makereport(item=item, call=call)]


def warn(ranks: list[Rank]) -> None:
    """Give pytest the warnings of all ranks, each once."""
    each = {repr(one): one for rank in ranks for one in rank.warnings}
    with warnings.catch_warnings():
        warnings.simplefilter("always")  # each rank has filtered its own
        for text, (module, name), file, line in each.values():
            category = getattr(sys.modules.get(module), name, UserWarning)
            warnings.warn_explicit(text, category, file, line)
