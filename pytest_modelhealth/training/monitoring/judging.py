"""Has rules follow a training: what began in each step, its report, and what is done at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Literal

import numpy as np

from pytest_modelhealth.checks import Check
from pytest_modelhealth.checks.check import Listed
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.errors import InspectionError, ModelHealthWarning
from pytest_modelhealth.report import Course, CourseEvent, Finding, HealthReport, Observation
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.training.monitoring.course import Follower, Table
from pytest_modelhealth.training.monitoring.row import Event, StepRow
from pytest_modelhealth.training.monitoring.rule import RULES
from pytest_modelhealth.training.monitoring.rules import (  # noqa: F401 - each adds its rules
    signals,
    surroundings,
    weights,
)

Reaction = Literal["raise", "warn"] | Callable[[Finding], object] | None


class TrainingJudge:
    """Has rules follow a training, and makes the report of it.

    Args:
        settings: the limits in force.
        make_report: makes a report.
        on_violation: what to do as soon as a rule fails; ``None`` leaves that to the report.

    Raises:
        InspectionError: `on_violation` is nothing that can be done.
    """

    observation: Observation  # of the latest step

    def __init__(
        self,
        settings: Settings,
        make_report: Callable[[Observation], HealthReport],
        on_violation: Reaction = None,
    ) -> None:
        if not (on_violation in (None, "raise", "warn") or callable(on_violation)):
            raise InspectionError(
                "on_violation must be 'raise', 'warn', a function that takes the violation, or "
                f"None, not {on_violation!r} ({type(on_violation).__name__})"
            )
        self._settings = settings
        self._make_report = make_report
        self._on_violation = on_violation
        self._table = Table()
        checks = [c for c in settings.checks if isinstance(c, Check) and settings.chooses(c.name)]
        self._followers = [
            Follower(check.name, check.role, self._table, RULES[check.name].see)
            for check in checks
            if check.name in RULES
        ]
        self._began: set[tuple[str, ...]] = set()  # rule, kind, layer and severity
        self._answered: set[tuple[str, str]] = set()
        self._report: HealthReport | None = None

    def follow(self, row: StepRow, observation: Observation) -> StepRow:
        """See a step, and return its numbers with what began in it, a phrase each."""
        self.observation, self._report = observation, None
        self._table.take(row)
        with np.errstate(all="ignore"):
            for follower in self._followers:
                follower.follow()
        phrases = []
        for event in [event for follower in self._followers for event in follower.changed]:
            key = event.rule, event.kind, event.layer
            if (*key, "fail") in self._began:
                continue
            breach = RULES[event.rule].assess(event, self._course(), self._settings)
            if breach is not None and (*key, breach.grade) not in self._began:
                self._began.add((*key, breach.grade))
                phrases.append(f"{event.rule}: {breach.message}")
        return replace(row, began=tuple(phrases)) if phrases else row

    def _course(self, events: tuple[CourseEvent, ...] = ()) -> Course:
        table = self._table
        return Course(
            table.steps, table.passes, table.most_optimizer_steps, table.loss.summary, events
        )

    @property
    def course(self) -> Course:
        """How the training went so far, with what rules say of it."""
        events = [event for follower in self._followers for event in follower.events.values()]
        return self._course(tuple(sorted(events, key=lambda event: event.step)))

    @property
    def report(self) -> HealthReport:
        """The report of the training so far: the latest step, with its course."""
        if self._report is None:
            self._report = self._make_report(replace(self.observation, course=self.course))
        return self._report

    @property
    def events(self) -> tuple[Event, ...]:
        """What rules object to, the gravest first, each with the step it began in."""
        if not self._table.steps:
            return ()
        judgement = self.report._judgement
        return tuple(
            Event(one.step, one.layer, one.message)
            for one in judgement.violations + judgement.warned
            if one.step is not None
        )

    def react(self, row: StepRow) -> None:
        """Do what is asked for, once for each rule and layer that fails for the first time.

        Args:
            row: the latest step, with what began in it.

        Raises:
            ModelHealthError: where that is to raise.
        """
        if self._on_violation is None or not row.began:
            return
        for violation in self.report._judgement.violations:
            if (violation.check, violation.layer) in self._answered:
                continue
            self._answered.update((violation.check, layer) for layer in violation.layers)
            if self._on_violation == "raise":
                error = self.report._failure()
                assert error is not None
                raise error
            if callable(self._on_violation):
                self._on_violation(violation)
            else:
                layer = violation.layer or self.report.observation.model_type
                text = f"{layer} ({violation.check}): {violation.message}"
                warnings.warn(text, ModelHealthWarning, stacklevel=4)


_TOGETHER = 20


def findings(check: Listed, observation: Observation, settings: Settings) -> Iterator[Finding]:
    """Yield what a training breaks, if one was watched, or that nothing was seen of it.

    Of several violations in one layer the first stands, those of other layers that begin with an
    earlier one of the kind are what it affects, and one that a waiver accepts stands alone.
    """
    course, rule = observation.course, RULES[check.name]
    assert course is not None  # by the catalogue
    if rule.unseen and not course.passes and course.steps:
        yield check.inconclusive(place(observation), rule.unseen.format(course.steps))
    own = [event for event in course.events if event.rule == check.name]
    breaches = [
        (event, breach) for event in own if (breach := rule.assess(event, course, settings))
    ]
    breaches.sort(key=lambda pair: (pair[1].grade != "fail", pair[0].step))
    roots: list[tuple[CourseEvent, Finding]] = []
    for event, breach in breaches:
        breach = replace(breach, layer=place(observation, event.layer).name)
        if any(waiver.covers(breach.check, breach.layer) for waiver in settings.waivers):
            yield breach
            continue
        same_layer = [n for n, (_, root) in enumerate(roots) if root.layer == breach.layer]
        together = [
            n
            for n, (first, root) in enumerate(roots)
            if (first.kind, root.grade) == (event.kind, breach.grade)
            and abs(event.step - first.step) <= max(_TOGETHER, first.rows)
        ]
        if not (same_layer or together):
            roots.append((event, breach))
            continue
        at = (same_layer or together)[0]
        first, root = roots[at]
        if same_layer:
            root = replace(root, details=(*root.details, breach.message))
        else:
            root = replace(root, affected=(*root.affected, breach.layer))
        roots[at] = first, root
    yield from (root for _, root in roots)
