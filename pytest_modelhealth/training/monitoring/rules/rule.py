"""`Rule`: what must hold over a whole training. A new one is one class in a file here."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_modelhealth.checks import Check, Finding
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.settings import Limit, Settings, Severity

if TYPE_CHECKING:
    from pytest_modelhealth.report import Course, CourseEvent, Observation, Violation
    from pytest_modelhealth.training.monitoring.following.follower import Follower

PATIENCE = 10
"""How many watched steps something must go on for: what is shorter is a spike."""

_TOGETHER = 20


@dataclass(frozen=True)
class Breach:
    """What is wrong with an event.

    Args:
        message: what is wrong, one sentence that stands alone.
        value: what was measured.
        limit: the limit it breaks, if one is a number.
        severity: ``"warn"`` where a design may look the same, and nothing seen tells.
        cause: the likely cause, one sentence.
        details: what else was seen, a sentence each.
    """

    message: str
    value: float
    limit: Limit | None = None
    severity: Severity = "fail"
    cause: str = ""
    details: tuple[str, ...] = ()


class Rule(Check):
    """One promise of a training, held against the course that a monitor saw of it.

    A `Follower` sees each step, remembers little, and says what began; `assess` is stateless and
    says whether that breaks a limit. It says nothing of other runs.
    """

    follows: ClassVar[str]
    """The `Follower` of the rule: ``"weights:RatioFollower"``, loaded with the first training."""
    judges_steps = True
    minimum_evidence = "a monitored training"
    occasion = "A whole training: inspector(model).monitor()"

    def run(self, observation: Observation, settings: Settings) -> Iterator[Finding]:
        """Yield what a training breaks, if one was watched."""
        course = observation.course
        if course is None:
            return
        found = []
        for event in course.events:
            if event.rule == self.name:
                breach = self.assess(event, course, settings)
                if breach is not None:
                    found.append((event, breach))
        found.sort(key=lambda pair: (pair[1].severity != "fail", pair[0].step))
        yield from _together(
            [(event, self._violation(event, breach, observation)) for event, breach in found],
            settings,
        )

    def follower(self) -> Follower:
        """Return what sees the steps of one training for this rule."""
        kind: Any = resolve_name(f"{__name__.rpartition('.rules')[0]}.following.{self.follows}")
        follower: Follower = kind(self.name)
        return follower

    @abstractmethod
    def assess(self, event: CourseEvent, course: Course, settings: Settings) -> Breach | None:
        """Return what is wrong with an event, as it stands now, if anything is."""

    def _violation(self, event: CourseEvent, breach: Breach, observation: Observation) -> Violation:
        return self.violation(
            place(observation, event.layer),
            breach.message,
            value=breach.value,
            limit=breach.limit,
            role=event.role,
            tensor=event.tensor,
            cause=breach.cause,
            independent=True,
            severity=breach.severity,
            details=breach.details,
        )


def _together(
    found: list[tuple[CourseEvent, Violation]], settings: Settings
) -> Iterator[Violation]:
    """Yield violations, those that begin with an earlier one of the kind as layers it affects.

    Of several in one layer the first stands; one that a waiver accepts stands alone.
    """
    roots: list[tuple[CourseEvent, Violation]] = []
    alone = []
    for event, violation in found:
        if any(waiver.covers(violation.check, violation.layer) for waiver in settings.waivers):
            alone.append(violation)
            continue
        same = (at for at, (_, root) in enumerate(roots) if root.layer == violation.layer)
        at = next(same, None)
        if at is not None:
            first, root = roots[at]
            roots[at] = first, replace(root, details=(*root.details, violation.message))
            continue
        for at, (first, root) in enumerate(roots):
            is_same = (first.kind, root.severity) == (event.kind, violation.severity)
            if is_same and abs(event.step - first.step) <= max(_TOGETHER, first.rows):
                affected = (*root.affected, violation.layer)
                roots[at] = first, replace(root, affected=affected)
                break
        else:
            roots.append((event, violation))
    yield from (root for _, root in roots)
    yield from alone


def named(event: CourseEvent) -> str:
    """Return the layer of an event for people."""
    return repr(event.layer) if event.layer else "the model"


def shown(value: float) -> str:
    """Return a number for people."""
    return f"{value:.3g}"


def sort_of(event: CourseEvent, course: Course, *, alone: bool = False) -> Severity:
    """Return ``"fail"`` where the loss tells that something went wrong, else ``"warn"``.

    Args:
        event: what goes on.
        course: how the training went.
        alone: whether an unknown loss is no excuse.
    """
    loss = course.loss
    if not loss.is_known:
        return "fail" if alone else "warn"
    return "warn" if loss.is_well else "fail"


def is_short(event: CourseEvent, least: int = PATIENCE) -> bool:
    """Whether an event is over, or too new to tell."""
    return event.recovered or event.rows < least


def known(value: float) -> bool:
    """Whether a number was seen."""
    return not math.isnan(value)
