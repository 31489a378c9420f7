"""What every result with a verdict has, and what the checks found."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from pytest_modelhealth.errors import ModelHealthError
from pytest_modelhealth.report.finding import Finding, Grade
from pytest_modelhealth.report.observation import Observation
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.settings.setting import Waiver


class Verdict(StrEnum):
    """The three outcomes of judging a report."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Judgement:
    """What all checks found in one report under one set of limits.

    Args:
        findings: the gravest first: by check, then in execution order; each with its grade and its
            consequences folded under it, also those that a waiver accepted.
        unused_waivers: waivers that accepted nothing.
    """

    findings: tuple[Finding, ...] = ()
    unused_waivers: tuple[Waiver, ...] = ()

    def _graded(self, grade: Grade) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.grade == grade and f.waiver is None)

    @property
    def violations(self) -> tuple[Finding, ...]:
        """What fails."""
        return self._graded("fail")

    @property
    def warned(self) -> tuple[Finding, ...]:
        """What only warns, by its check's severity or its own."""
        return self._graded("warn")

    @property
    def notes(self) -> tuple[Finding, ...]:
        """What is worth knowing, and changes no verdict."""
        return self._graded("note")

    @property
    def inconclusive(self) -> tuple[Finding, ...]:
        """What could not be judged."""
        return self._graded("unsure")

    @property
    def broken(self) -> tuple[Finding, ...]:
        """Checks that failed themselves; what they found before that stands."""
        return self._graded("broken")

    @property
    def waived(self) -> tuple[Finding, ...]:
        """What a waiver accepted."""
        return tuple(finding for finding in self.findings if finding.waiver is not None)

    @property
    def verdict(self) -> Verdict:
        """``unhealthy`` if anything is violated, else whether all could be judged.

        What only warns does not change it; what a broken check was to judge is not judged.
        """
        if self.violations:
            return Verdict.UNHEALTHY
        unjudged = self.inconclusive or self.broken
        return Verdict.INCONCLUSIVE if unjudged else Verdict.HEALTHY

    @property
    def passes(self) -> bool:
        """Whether a test may pass: nothing is violated and every check could run."""
        return not self.violations and not self.broken


Judge = Callable[[Observation, Settings], Judgement]


Renderer = Callable[[str, str], Callable[..., Any]]
"""Gives a function by the file on the shelf of formats that holds it, and its name.

The shelf lies above the results in the order of imports: what makes one hands this in.
"""


class HasVerdict(ABC):
    """A result with a verdict; as a truth value it is whether that is the good one."""

    _renderer: Renderer
    _verdict_asked = False
    """Whether the verdict was asked for; numbers, tables and pictures are no question for it."""

    @abstractmethod
    def _passed(self) -> bool:
        """Return whether the verdict is the good one; this counts as asking."""

    @abstractmethod
    def _denial(self) -> ModelHealthError:
        """Return the error for an `assert` of this result that does not hold."""

    def _shown(self, form: str, function: str, *args: Any, **options: Any) -> Any:
        """Return what a format makes of this, which is not to ask for its verdict."""
        with self._unasked():
            return self._renderer(form, function)(self, *args, **options)

    def __bool__(self) -> bool:
        passed = self._passed()
        if not passed:
            _note(self, sys._getframe(1).f_code.co_filename, sys._getframe(1).f_lineno)
        return passed

    @contextmanager
    def _unasked(self) -> Iterator[None]:
        """Read the verdict inside to show it, which is not to ask for it."""
        asked = self._verdict_asked
        try:
            yield
        finally:
            self._verdict_asked = asked


class Denied(NamedTuple):
    """A result that was false as a truth value, and the line that asked."""

    result: HasVerdict
    path: str
    line: int

    def error(self) -> ModelHealthError:
        """Return the error that says why it was false."""
        with self.result._unasked():
            return self.result._denial()


_latest: Denied | None = None


def _note(result: HasVerdict, path: str, line: int) -> None:
    # Only in a test, which pytest says by this variable, does the plugin take it again: a script
    # would hold the report for nothing.
    global _latest
    if "PYTEST_CURRENT_TEST" in os.environ:
        _latest = Denied(result, path, line)


def take_denied() -> Denied | None:
    """Return the latest result that was false as a truth value, and forget it."""
    global _latest
    taken, _latest = _latest, None
    return taken
