"""What the checks found in an observation: violations, what could not be judged, the verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from pytest_modelhealth.report.observation import Observation
from pytest_modelhealth.settings import Settings, Severity
from pytest_modelhealth.settings.waiver import Waiver


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
