"""`Rule`: what must hold over a whole training. A new one is a class in a file of `rules/`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar

from pytest_modelhealth.checks import Check, Finding
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.report import Course, CourseEvent, Observation, Violation
from pytest_modelhealth.settings import Limit, Settings, Severity

if TYPE_CHECKING:
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


Grade = Callable[[CourseEvent, Course], Severity | None]


@dataclass(frozen=True)
class Kind:
    """What a rule objects to in one kind of event: a row of its table.

    Args:
        kind: that of the event; of several rows for one the first that applies counts.
        message: what is wrong; fields of the event, of the loss and of what was measured in braces.
        cause: the likely cause, one sentence.
        measure: what of an event is held against the limit, one of `_MEASURES`.
        limit: name of the setting; without one whatever `grade` grades is wrong.
        below: whether values below the limit break it, and not those above.
        scale: what the limit is multiplied by first.
        patience: how many watched steps it must go on for, unless these are measured.
        grade: how wrong it is, or what says so of event and course; ``None`` is not at all.
    """

    kind: str
    message: str
    cause: str
    measure: str = "value"
    limit: str = ""
    below: bool = False
    scale: float = 1.0
    patience: int = PATIENCE
    grade: Severity | Grade = "fail"

    def assess(self, event: CourseEvent, course: Course, settings: Settings) -> Breach | None:
        """Return what is wrong with an event, if anything is."""
        is_short = self.measure != "rows" and event.rows < self.patience
        if event.recovered or is_short:
            return None
        change = event.value / event.reference if event.reference else float(self.below)
        measured = _MEASURES[self.measure](event, change)
        limit = settings.limit(self.limit, event.layer) if self.limit else None
        if limit is not None:
            bound = limit.value * self.scale
            if not (measured < bound if self.below else measured > bound):
                return None
        severity = self.grade if isinstance(self.grade, str) else self.grade(event, course)
        if severity is None:
            return None
        told = {**vars(event), **event.facts, "layer": named(event), "change": change}
        message = self.message.format(**told, loss=course.loss)
        return Breach(message, measured, limit, severity, self.cause)


_MEASURES: dict[str, Callable[[CourseEvent, float], float]] = {
    "value": lambda event, change: event.value,
    "rows": lambda event, change: float(event.rows),
    "change": lambda event, change: change,
    "factor": lambda event, change: max(change, 1.0 / change if change else 0.0),
    "jump": lambda event, change: abs(event.value - event.reference),
}
"""By name: the value, how many steps showed it, the value by its reference (also up or down)."""


class Rule(Check):
    """One promise of a training, held against the course that a monitor saw of it.

    A `Follower` sees each step, remembers little, and says what began; `assess` is stateless and
    says whether that breaks a limit. It says nothing of other runs.
    """

    follows: ClassVar[str]
    """The `Follower` of the rule: ``"weights:RatioFollower"``, loaded with the first training."""
    kinds: ClassVar[tuple[Kind, ...]] = ()
    """What it objects to."""
    judges_steps = True
    occasion = "A whole training: inspector(model).monitor()"

    def run(self, observation: Observation, settings: Settings) -> Iterator[Finding]:
        """Yield what a training breaks, if one was watched."""
        course = observation.course
        if course is None:
            return
        events = (event for event in course.events if event.rule == self.name)
        assessed = [(event, self.assess(event, course, settings)) for event in events]
        found = [(event, breach) for event, breach in assessed if breach is not None]
        found.sort(key=lambda pair: (pair[1].severity != "fail", pair[0].step))
        yield from _together(
            [(event, self._violation(event, breach, observation)) for event, breach in found],
            settings,
        )

    def follower(self) -> Follower:
        """Return what sees the steps of one training for this rule."""
        kind: Any = resolve_name(f"{__package__}.following.{self.follows}")
        follower: Follower = kind(self.name)
        return follower

    def assess(self, event: CourseEvent, course: Course, settings: Settings) -> Breach | None:
        """Return what is wrong with an event, as it stands now, if anything is."""
        rows = (kind for kind in self.kinds if kind.kind == event.kind)
        assessed = (row.assess(event, course, settings) for row in rows)
        return next((breach for breach in assessed if breach is not None), None)

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
        for at, (first, root) in enumerate(roots):
            if root.layer == violation.layer:
                roots[at] = first, replace(root, details=(*root.details, violation.message))
                break
        else:
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


def by_loss(event: CourseEvent, course: Course) -> Severity | None:
    """Return ``"fail"`` where the loss tells that something went wrong, else ``"warn"``."""
    return "fail" if course.loss.is_known and not course.loss.is_well else "warn"
