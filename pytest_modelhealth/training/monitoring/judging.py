"""The rules follow a training: what began in each step, its report, and what is done at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal

import numpy as np

from pytest_modelhealth.checks import Check
from pytest_modelhealth.errors import InspectionError, ModelHealthWarning, suggest
from pytest_modelhealth.report import Course, CourseEvent, HealthReport, Observation, Violation
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.training.monitoring.following.follower import Table
from pytest_modelhealth.training.monitoring.row import Event, StepRow
from pytest_modelhealth.training.monitoring.rules import RULES


class CourseObserver:
    """Follows a training for the rules among checks.

    Args:
        checks: the checks that judge it.
        settings: the limits in force.
    """

    def __init__(self, checks: Iterable[Check], settings: Settings) -> None:
        chosen = (check.name for check in checks if settings.chooses(check.name))
        self._followed = [
            (RULES[name], RULES[name].follower(name)) for name in chosen if name in RULES
        ]
        self._settings = settings
        self._table = Table()
        self._told: set[tuple[str, ...]] = set()
        self._first_step: int | None = None
        self._passes = self._optimizer_steps = self._most = 0

    def follow(self, row: StepRow) -> list[str]:
        """See a step, and return what is wrong since now, a phrase each."""
        if self._first_step is None:
            self._first_step = row.step
        self._passes += row.passes
        self._optimizer_steps += row.optimizer_steps
        self._most = max(self._most, row.optimizer_steps)
        table = self._table
        table.take(row)
        with np.errstate(all="ignore"):
            for _, follower in self._followed:
                follower.follow(table)
        begun = []
        course: Course | None = None
        for rule, follower in self._followed:
            for event in follower.changed:
                key = event.rule, event.kind, event.layer
                if (*key, "fail") in self._told:
                    continue
                course = course or self._course(())
                breach = rule.assess(event, course, self._settings)
                if breach is not None and (*key, breach.severity) not in self._told:
                    self._told.add((*key, breach.severity))
                    begun.append(f"{event.rule}: {breach.message}")
        return begun

    def steps_of_breaches(self) -> dict[str, int]:
        """Return the step in which each breach began that stands now, by its message."""
        course = self.course
        found: dict[str, int] = {}
        for event in course.events:
            breach = RULES[event.rule].assess(event, course, self._settings)
            if breach is not None:
                found.setdefault(breach.message, event.step)
        return found

    @property
    def course(self) -> Course:
        """How the training went so far."""
        every = [event for _, follower in self._followed for event in follower.events()]
        return self._course(tuple(sorted(every, key=lambda event: event.step)))

    def _course(self, events: tuple[CourseEvent, ...]) -> Course:
        table = self._table
        return Course(
            steps=table.steps,
            first_step=self._first_step or 0,
            last_step=table.row.step if table.steps else 0,
            passes=self._passes,
            optimizer_steps=self._optimizer_steps,
            most_optimizer_steps=self._most,
            loss=table.loss.summary,
            events=events,
        )


Reaction = Literal["raise", "warn"] | Callable[[Violation], object] | None
_WORDS = ("raise", "warn")


class TrainingJudge:
    """Has rules follow a training, and makes the report of it.

    Args:
        settings: the limits in force.
        make_report: makes a report.
        on_report: told of the report when the training is over.
        on_violation: what to do as soon as a rule fails; ``None`` leaves that to the report.

    Raises:
        InspectionError: `on_violation` is nothing that can be done.
    """

    def __init__(
        self,
        settings: Settings,
        make_report: Callable[[Observation], HealthReport],
        on_report: Callable[[HealthReport], object] | None,
        on_violation: Reaction,
    ) -> None:
        is_sound = on_violation is None or callable(on_violation) or on_violation in _WORDS
        if not is_sound:
            nearest = suggest(on_violation, _WORDS) if isinstance(on_violation, str) else ""
            raise InspectionError(
                "on_violation must be 'raise', 'warn', a function that takes the violation, or "
                f"None, not {on_violation!r} ({type(on_violation).__name__}){nearest}"
            )
        self._on_violation = on_violation
        self._make_report = make_report
        self._on_report = on_report
        self._observer = CourseObserver(settings.checks, settings)  # type: ignore[arg-type]
        self._report: HealthReport | None = None
        self._handed_out: HealthReport | None = None
        self._answered: set[tuple[str, str]] = set()

    def follow(self, row: StepRow) -> StepRow:
        """See a step, and return it with what began in it."""
        begun = self._observer.follow(row)
        self._report = None
        return replace(row, began=tuple(begun)) if begun else row

    def report(self, observation: Observation) -> HealthReport:
        """Return the report of the training so far.

        Args:
            observation: what was seen of the latest step.
        """
        if self._report is None:
            whole = replace(observation, course=self._observer.course)
            self._report = self._make_report(whole)
        return self._report

    def events(self, observation: Observation, *, warnings: bool = True) -> tuple[Event, ...]:
        """Return what rules object to, the gravest first, each with the step it began in.

        Args:
            observation: what was seen of the latest step.
            warnings: whether what only warns is among it.
        """
        report = self.report(observation)
        found = report._judgement.violations + (report._judgement.warned if warnings else ())
        steps = self._observer.steps_of_breaches()
        return tuple(
            Event(steps[each.message], each.layer, each.message)
            for each in found
            if each.message in steps
        )

    def hand_out(self, observation: Observation) -> None:
        """Have the report of the whole training noted, once."""
        report = self.report(observation)
        if self._on_report is not None and self._handed_out is not report:
            self._handed_out = report
            self._on_report(report)

    def react(self, row: StepRow, observation: Observation) -> None:
        """Do what is asked for, once for each rule and layer that fails for the first time.

        Args:
            row: the latest step, with what began in it.
            observation: what was seen of it.

        Raises:
            ModelHealthError: where that is to raise.
        """
        if self._on_violation is None or not row.began:
            return
        report = self.report(observation)
        violations = report._judgement.violations
        new = [v for v in violations if (v.check, v.layer) not in self._answered]
        for violation in new:
            self._answered.update((violation.check, layer) for layer in violation.layers)
        if not new:
            return
        if self._on_violation == "raise":
            error = report._failure()
            assert error is not None
            raise error
        for violation in new:
            if callable(self._on_violation):
                self._on_violation(violation)
            else:
                text = f"{violation.layer or observation.model_type} ({violation.check}): "
                warnings.warn(text + violation.message, ModelHealthWarning, stacklevel=4)
