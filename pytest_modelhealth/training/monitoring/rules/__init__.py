"""The checks of a whole training: a table each of what is wrong with what a follower saw begin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.checks.check import Listed
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.report import CourseEvent, Observation, Violation
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.training.monitoring.rule import Rule
from pytest_modelhealth.training.monitoring.rules import signals, surroundings, weights

RULES: dict[str, Rule] = {**signals.RULES, **surroundings.RULES, **weights.RULES}
"""What follows a training for a check, and what that check objects to."""

_TOGETHER = 20


def findings(check: Listed, observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield what a training breaks, if one was watched, or that nothing was seen of it."""
    course, rule = observation.course, RULES[check.name]
    if course is None:
        return
    if rule.unseen and not course.passes and course.steps:
        yield check.inconclusive(place(observation), rule.unseen.format(course.steps))
    events = (event for event in course.events if event.rule == check.name)
    assessed = [(event, rule.assess(event, course, settings)) for event in events]
    found = [
        (event, replace(violation, layer=place(observation, event.layer).name))
        for event, violation in assessed
        if violation is not None
    ]
    found.sort(key=lambda pair: (pair[1].severity != "fail", pair[0].step))
    yield from _together(found, settings)


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
