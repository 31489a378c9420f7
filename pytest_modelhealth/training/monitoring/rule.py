"""What must hold over a whole training. A new rule is a generator in a file of `rules/`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pytest_modelhealth.report import Course, CourseEvent, Finding
from pytest_modelhealth.settings import Settings, Severity
from pytest_modelhealth.training.catalogue import TRAINING
from pytest_modelhealth.training.monitoring.course import See

PATIENCE = 10
"""How many watched steps something must go on for: what is shorter is a spike."""

Assess = Callable[[CourseEvent, Course, Settings], Finding | None]


class Rule(NamedTuple):
    """What must hold over a whole training."""

    see: See  # sees each step, remembers little, and says what began
    assess: Assess  # says whether that breaks a limit, as it stands now; it is stateless
    unseen: str = ""  # what to say where no forward pass was seen, by the number of steps


RULES: dict[str, Rule] = {}
"""What follows a training for a check, and what that check objects to."""


@dataclass(frozen=True)
class Kind:
    """What a rule objects to in one kind of event: a row of its table."""

    kind: str  # that of the event
    message: str  # fields of the event, of the loss and of what was measured stand in braces
    cause: str  # the likely cause, one sentence
    # what of an event is held against the limit: its ``value``, the ``change`` of that by its
    # reference, the ``factor`` up or down, or for how many ``rows`` it went on
    measure: str = "value"
    # name of the setting, of a least value where it begins with ``min_``; without one whatever
    # `grade` grades is wrong
    limit: str = ""
    scale: float = 1.0  # what the limit is multiplied by first
    patience: int = PATIENCE  # watched steps that it must go on for, unless these are measured
    # how wrong it is, or what says so of event and course; ``None`` is not at all
    grade: Severity | Callable[[CourseEvent, Course], Severity | None] = "fail"

    def assess(self, event: CourseEvent, course: Course, settings: Settings) -> Finding | None:
        """Return what is wrong with an event, if anything is."""
        if event.recovered or (self.measure != "rows" and event.rows < self.patience):
            return None
        is_least = self.limit.startswith("min_")
        change = event.value / event.reference if event.reference else float(is_least)
        measures = {
            "value": event.value,
            "change": change,
            "factor": max(change, 1.0 / change if change else 0.0),
            "rows": float(event.rows),
        }
        value, limit = measures[self.measure], None
        if self.limit:
            limit = settings.limit(self.limit, event.layer)
            bound = limit.value * self.scale
            if not (value < bound if is_least else value > bound):
                return None
        severity = self.grade if isinstance(self.grade, str) else self.grade(event, course)
        if severity is None:
            return None
        facts = {**vars(event), **event.facts, "layer": label(event), "change": change}
        message = self.message.format(**facts, loss=course.loss)
        return breach(event, message, value, limit=limit, severity=severity, cause=self.cause)


def rule(
    *kinds: Kind, assess: Assess | None = None, unless: str = "", unseen: str = ""
) -> Callable[[See], See]:
    """Return a decorator of what sees the steps for the rule of its name.

    Args:
        kinds: the kinds of events that the rule objects to.
        assess: what says so in place of them.
        unless: what of the loss leaves nothing to object to.
        unseen: as of `Rule`.
    """
    table = {kind.kind: kind for kind in kinds}

    def by_kind(event: CourseEvent, course: Course, settings: Settings) -> Finding | None:
        if unless and getattr(course.loss, unless):
            return None
        return table[event.kind].assess(event, course, settings)

    def register(see: See) -> See:
        RULES[see.__name__] = Rule(see, assess or by_kind, unseen)
        return see

    return register


def breach(event: CourseEvent, message: str, value: float, **more: Any) -> Finding:
    """Return what is wrong with an event; the rest as of `Check.violation`."""
    more |= {"role": event.role, "tensor": event.tensor, "step": event.step, "independent": True}
    return TRAINING[event.rule].violation(event.layer, message, value=value, **more)


def label(event: CourseEvent) -> str:
    """Return the layer of an event for people."""
    return repr(event.layer) if event.layer else "the model"


def by_loss(event: CourseEvent, course: Course) -> Severity | None:
    """Return ``"fail"`` where the loss tells that something went wrong, else ``"warn"``."""
    return "fail" if course.loss.is_known and not course.loss.is_well else "warn"
