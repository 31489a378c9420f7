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
from pytest_modelhealth.report.observation import Observation
from pytest_modelhealth.settings import Settings, Severity
from pytest_modelhealth.settings.setting import Waiver


class Verdict(StrEnum):
    """The three outcomes of judging a report."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Reference:
    """Statistics in a report: a layer, a role, and the tensor's own name where it has several."""

    layer: str
    role: str
    tensor: str = ""


@dataclass(frozen=True)
class Violation:
    """One broken invariant, and what follows from it.

    Args:
        check: name of the check.
        layer: fully qualified name of the culprit.
        role: which tensor of it.
        value: what was measured.
        limit: the limit it broke; ``None`` where none is a number (nothing may be NaN).
        origin: where the limit came from (``"default"``, ``"pytest.ini: modelhealth_..."``).
        message: what is wrong, one sentence that stands alone.
        cause: the likely cause, one sentence.
        tensor: own name of the tensor (``"weight"``), where the role has several.
        affected: names of the layers that only show what this one began; they are counted for the
            reader, and keep the violation where only they are judged (the setting ``layers``).
        independent: whether no fault elsewhere can bring this about (a graph that is cut, a
            parameter that is not registered); other violations can be consequences.
        between_ranks: whether it is about what ranks disagree in, which says nothing of the
            numbers that each of them has by itself.
        severity: ``"warn"`` where a design may look the same; it fails only where the setting
            ``severity`` says of this check that it fails.
        evidence: the statistics that were read, the culprit's first, then those of what comes
            before it; the diagnosis fills it in where the check leaves it empty.
        details: what else was seen, a sentence each, the most telling first.
        folded: violations that are consequences of this one, in causal order.
    """

    check: str
    layer: str
    role: str
    value: float
    limit: float | None
    origin: str
    message: str
    cause: str
    tensor: str = ""
    affected: tuple[str, ...] = ()
    independent: bool = False
    between_ranks: bool = False
    severity: Severity = "fail"
    evidence: tuple[Reference, ...] = ()
    details: tuple[str, ...] = ()
    folded: tuple[Violation, ...] = ()

    @property
    def consequences(self) -> int:
        """How many other layers only show what this one began."""
        return len(self.layers) - 1

    @property
    def layers(self) -> tuple[str, ...]:
        """The culprit, then the other layers that show what it began, each once."""
        shown = [name for violation in self.folded for name in violation.layers]
        return tuple(dict.fromkeys((self.layer, *self.affected, *shown)))


@dataclass(frozen=True)
class Inconclusive:
    """A check that had too little evidence to judge a layer, and what it would need."""

    check: str
    layer: str
    reason: str


@dataclass(frozen=True)
class BrokenCheck:
    """A check that raised, or gave something that is no finding; what it found before that stands.

    Args:
        check: its name.
        message: what it did, with the exception's type and text.
        place: ``path:line``, and where it raised the line itself.
    """

    check: str
    message: str
    place: str


@dataclass(frozen=True)
class Judgement:
    """What all checks found in one report under one set of limits.

    Args:
        violations: the gravest first: by check, then in execution order; each with its
            consequences folded under it.
        inconclusive: what could not be judged.
        waived: violations that a waiver accepted, each with its waiver.
        unused_waivers: waivers that accepted nothing.
        warned: violations that only warn, by their check's severity or their own, in the order of
            `violations`.
        broken: checks that failed themselves.
    """

    violations: tuple[Violation, ...] = ()
    inconclusive: tuple[Inconclusive, ...] = ()
    waived: tuple[tuple[Violation, Waiver], ...] = ()
    unused_waivers: tuple[Waiver, ...] = ()
    warned: tuple[Violation, ...] = ()
    broken: tuple[BrokenCheck, ...] = ()

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
