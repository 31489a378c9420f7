"""The checks of a whole training: a table each of what is wrong with what began in a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pytest_modelhealth.checks.check import Listed
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.report import CourseEvent, Finding, Observation
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.training.monitoring.rule import Rule
from pytest_modelhealth.training.monitoring.rules import signals, surroundings, weights

RULES: dict[str, Rule] = {**signals.RULES, **surroundings.RULES, **weights.RULES}
"""What follows a training for a check, and what that check objects to."""

_TOGETHER = 20


def findings(check: Listed, observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield what a training breaks, if one was watched, or that nothing was seen of it.

    Of several violations in one layer the first stands, those of other layers that begin with an
    earlier one of the kind are what it affects, and one that a waiver accepts stands alone.
    """
    course, rule = observation.course, RULES[check.name]
    if course is None:
        return
    if rule.unseen and not course.passes and course.steps:
        yield check.inconclusive(place(observation), rule.unseen.format(course.steps))
    breaches = []
    for event in course.events:
        violation = rule.assess(event, course, settings) if event.rule == check.name else None
        if violation is not None:
            layer = place(observation, event.layer).name
            breaches.append((event, replace(violation, layer=layer)))
    breaches.sort(key=lambda pair: (pair[1].grade != "fail", pair[0].step))
    roots: list[tuple[CourseEvent, Finding]] = []
    for event, violation in breaches:
        if any(waiver.covers(violation.check, violation.layer) for waiver in settings.waivers):
            yield violation
            continue
        at = _root_of(event, violation, roots)
        if at is None:
            roots.append((event, violation))
            continue
        first, root = roots[at]
        if root.layer == violation.layer:
            root = replace(root, details=(*root.details, violation.message))
        else:
            root = replace(root, affected=(*root.affected, violation.layer))
        roots[at] = first, root
    yield from (root for _, root in roots)


def _root_of(
    event: CourseEvent, violation: Finding, roots: list[tuple[CourseEvent, Finding]]
) -> int | None:
    """Return which violation one belongs to: that of its layer, or one of its kind and time."""
    for at, (_, root) in enumerate(roots):
        if root.layer == violation.layer:
            return at
    for at, (first, root) in enumerate(roots):
        is_same = (first.kind, root.grade) == (event.kind, violation.grade)
        if is_same and abs(event.step - first.step) <= max(_TOGETHER, first.rows):
            return at
    return None
