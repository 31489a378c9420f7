"""Saves the failing inspections of a test as bundles, while what they ran on is still there.

A bundle is written to a folder apart as soon as an inspection fails, and gets its place where the
test fails; of a test that passes after all, nothing stays.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from pytest_modelhealth.errors import ModelHealthError
from pytest_modelhealth.plugin.inspections import INSPECTOR, is_report
from pytest_modelhealth.plugin.output_files import folder_name, rank_suffix, warn_once

if TYPE_CHECKING:
    from pytest_modelhealth.bundles.file import Saved
    from pytest_modelhealth.bundles.recording import Ran, RecordingInspector
    from pytest_modelhealth.report import HealthReport, Observation

OPTION = "--modelhealth-replay"
MOST = 4
"""How many bundles of one test are kept."""
_WARNED = pytest.StashKey[bool]()
_NUMBERS = count(1)


class Kept(NamedTuple):
    """A bundle in its place.

    Args:
        folder: where it is.
        saved: what it has.
    """

    folder: Path
    saved: Saved


class _Latest(NamedTuple):
    """The inspection that was made last."""

    report: HealthReport
    ran: Ran
    test: dict[str, Any]


@dataclass
class _Staged:
    """A bundle that waits for the end of its test."""

    observation: Observation
    settings: Any
    folder: Path
    saved: Saved


class Keeper:
    """Keeps what the failing inspections of one test were made of.

    Args:
        item: the test.
        directory: where bundles go.
        limit: the most bytes of tensors in one.
        without: parts to leave out.
    """

    def __init__(
        self, item: pytest.Item, directory: Path, limit: float, without: tuple[str, ...]
    ) -> None:
        self._item, self._directory = item, directory
        self._limit, self._without = limit, without
        self._staged: list[_Staged] = []
        self._latest: _Latest | None = None
        self._reasons: dict[int, str] = {}
        self._inspections = 0
        self._placed = 0

    def make(self, *args: Any, **options: Any) -> RecordingInspector:
        """Return an inspector whose failing inspections are kept."""
        from pytest_modelhealth.bundles.recording import RecordingInspector

        made = RecordingInspector(*args, **options)
        made.count, made.keep, made.limit = self._count, self._keep, self._limit
        return made

    def place(self, error: BaseException) -> tuple[list[Kept], str]:
        """Return the bundles of a test that failed, now in their places.

        Args:
            error: what failed it.

        Returns:
            The bundles, that of `error` first, and why there is none of `error`, a phrase.
        """
        judged = error.report if isinstance(error, ModelHealthError) else None
        self._save_judged(judged)
        seen = judged.observation if is_report(judged) else None
        self._staged.sort(key=lambda staged: staged.observation is not seen)
        why = ""
        if judged is not None and not any(staged.observation is seen for staged in self._staged):
            why = self._why_none(judged)
        kept = []
        try:
            while self._staged:
                kept.append(Kept(self._move(self._staged[0].folder), self._staged[0].saved))
                self._staged.pop(0)
        except OSError as lost:
            why = self._lost(lost)
        return kept, why

    def discard(self) -> None:
        """Remove what waits for no failure any more, and let model and batches go."""
        for staged in self._staged:
            shutil.rmtree(staged.folder, ignore_errors=True)
        self._staged, self._latest = [], None

    def _count(self) -> int:
        self._inspections += 1
        return self._inspections

    def _keep(self, report: HealthReport, ran: Ran | None) -> None:
        """Save a failing inspection; whatever happens, the test's own result stands."""
        self._latest = None
        try:
            if ran is None or ran.too_large:
                self._reasons[id(report.observation)] = _why_not(ran, self._limit)
                return
            self._latest = _Latest(report, ran, self._test(ran))
            if _fails(report):
                self._stage(report)
        except Exception as error:  # noqa: BLE001 - an odd model must not fail for being saved
            self._reasons[id(report.observation)] = self._lost(error)

    def _test(self, ran: Ran) -> dict[str, Any]:
        fixture = self._item.stash.get(INSPECTOR, None)
        made = fixture.made[-1] if fixture is not None else None
        place = "" if made is None else f"{made.path.name}:{made.line}"
        return {"id": self._item.nodeid, "number": ran.number, "place": place}

    def _stage(self, report: HealthReport) -> None:
        """Write a bundle of the latest inspection to a folder apart."""
        from pytest_modelhealth.bundles.file import save

        assert self._latest is not None
        if len(self._staged) >= MOST:
            # the first of a test are kept, and the latest, which is the one that ends a loop
            dropped = self._staged.pop()
            shutil.rmtree(dropped.folder, ignore_errors=True)
            self._reasons[id(dropped.observation)] = (
                f"{MOST} other failing inspections of this test are saved"
            )
        folder = self._directory / f".unfinished-{os.getpid()}-{next(_NUMBERS)}"
        _, ran, test = self._latest
        saved = save(folder, ran, _unjudged(report), test, self._without)
        self._staged.append(_Staged(report.observation, report._settings, folder, saved))

    def _save_judged(self, judged: Any) -> None:
        """Save the latest inspection under the limits that failed it, if that is not done yet.

        `assert_healthy` may have had limits of its own.
        """
        latest = self._latest
        if latest is None or not is_report(judged):
            return
        if judged.observation is not latest.report.observation:
            return
        same = [s for s in self._staged if s.observation is judged.observation]
        if any(staged.settings == judged._settings for staged in same):
            return
        if not latest.ran.is_as_it_was():
            reason = "model or batch changed between the inspection and its assert_healthy(...)"
            self._reasons[id(judged.observation)] = reason
            return
        for staged in same:
            self._staged.remove(staged)
            shutil.rmtree(staged.folder, ignore_errors=True)
        try:
            # the random state is that of then: it was taken down before the run
            self._stage(judged)
        except Exception as error:  # noqa: BLE001 - as in `_keep`
            self._reasons[id(judged.observation)] = self._lost(error)

    def _why_none(self, judged: Any) -> str:
        if not is_report(judged):
            return "a comparison of two models is not saved; replay runs one model again"
        earlier = "another inspection followed it before the limits that it broke were named"
        return self._reasons.get(id(judged.observation), earlier)

    def _move(self, folder: Path) -> Path:
        """Move a bundle's files to their place; an earlier bundle there is replaced."""
        from pytest_modelhealth.bundles.file import CONTENT, FILES

        self._placed += 1
        name = folder_name(self._item.nodeid) + rank_suffix()
        place = self._directory / (name + (f"-{self._placed}" if self._placed > 1 else ""))
        place.mkdir(exist_ok=True)
        (place / CONTENT).unlink(missing_ok=True)
        for file in FILES:
            (folder / file).replace(place / file)
        folder.rmdir()
        return place

    def _lost(self, error: Exception) -> str:
        """Warn that a bundle could not be written, and return why."""
        kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
        why = f"it could not be written: {kind}{error}"
        warn_once(self._item, _WARNED, f"{OPTION}: a failing inspection is not saved, {why}")
        return why


def _why_not(ran: Ran | None, limit: float) -> str:
    if ran is None:
        return (
            "run_step, monitors and removable run more than an inspection; those of run_inspection "
            "and run_batches are saved"
        )
    return f"its batches are over the limit of {limit / 1e6:,.0f} MB ({OPTION}-limit)"


def _unjudged(report: HealthReport) -> HealthReport:
    """Return the same report, so that looking at it leaves no trace on the user's."""
    from pytest_modelhealth.checks.judging import judge
    from pytest_modelhealth.report import HealthReport

    return HealthReport(
        report.observation, report._settings, judge, report._noise, renderer=report._renderer
    )


def _fails(report: HealthReport) -> bool:
    return _unjudged(report)._failure() is not None
