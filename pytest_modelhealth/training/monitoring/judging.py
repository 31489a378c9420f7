"""The rules follow a training: what began in each step, its report, and what is done at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np

from pytest_modelhealth.checks import Check
from pytest_modelhealth.errors import InspectionError, ModelHealthWarning, suggest
from pytest_modelhealth.report import Course, HealthReport, Observation, Violation
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.training.monitoring.following.follower import Follower, Table
from pytest_modelhealth.training.monitoring.row import Event, StepRow
from pytest_modelhealth.training.monitoring.rules import RULES

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
        on_report: Callable[[HealthReport], object] | None = None,
        on_violation: Reaction = None,
    ) -> None:
        is_sound = on_violation is None or callable(on_violation) or on_violation in _WORDS
        if not is_sound:
            nearest = suggest(on_violation, _WORDS) if isinstance(on_violation, str) else ""
            raise InspectionError(
                "on_violation must be 'raise', 'warn', a function that takes the violation, or "
                f"None, not {on_violation!r} ({type(on_violation).__name__}){nearest}"
            )
        self._settings = settings
        self._make_report = make_report
        self._on_report = on_report
        self._on_violation = on_violation
        self._table = table = Table()
        checks = [c for c in settings.checks if isinstance(c, Check) and settings.chooses(c.name)]
        rules = [(check, RULES[check.name]) for check in checks if check.name in RULES]
        self._followers = [(r, Follower(c.name, c.role, table, r.see)) for c, r in rules]
        self._said: set[tuple[str, ...]] = set()  # what began, with its severity
        self._answered: set[tuple[str, str]] = set()
        self._observation: Observation | None = None
        self._report: HealthReport | None = None
        self._handed_out: HealthReport | None = None

    def follow(self, row: StepRow, observation: Observation) -> StepRow:
        """See a step, and return it with what began in it, a phrase each.

        Args:
            row: its numbers.
            observation: what was seen of it.
        """
        self._observation, self._report = observation, None
        self._table.take(row)
        with np.errstate(all="ignore"):
            for _, follower in self._followers:
                follower.follow()
        began = []
        course: Course | None = None
        for rule, follower in self._followers:
            for event in follower.changed:
                key = event.rule, event.kind, event.layer
                if (*key, "fail") in self._said:
                    continue
                course = course or self._table.course()
                breach = rule.assess(event, course, self._settings)
                if breach is not None and (*key, breach.severity) not in self._said:
                    self._said.add((*key, breach.severity))
                    began.append(f"{event.rule}: {breach.message}")
        return replace(row, began=tuple(began)) if began else row

    @property
    def course(self) -> Course:
        """How the training went so far."""
        return self._table.course(e for _, follower in self._followers for e in follower.events())

    @property
    def report(self) -> HealthReport:
        """The report of the training so far: the latest step, with its course."""
        assert self._observation is not None
        if self._report is None:
            self._report = self._make_report(replace(self._observation, course=self.course))
        return self._report

    def events(self, *, warnings: bool = True) -> tuple[Event, ...]:
        """Return what rules object to, the gravest first, each with the step it began in.

        Args:
            warnings: whether what only warns is among it.
        """
        if self._observation is None:
            return ()
        judgement, course = self.report._judgement, self.course
        steps: dict[str, int] = {}
        for event in course.events:
            breach = RULES[event.rule].assess(event, course, self._settings)
            if breach is not None:
                steps.setdefault(breach.message, event.step)
        return tuple(
            Event(steps[one.message], one.layer, one.message)
            for one in judgement.violations + (judgement.warned if warnings else ())
            if one.message in steps
        )

    def hand_out(self) -> None:
        """Have the report of the whole training noted, once."""
        if self._on_report is not None and self._handed_out is not self.report:
            self._handed_out = self.report
            self._on_report(self.report)

    def react(self, row: StepRow) -> None:
        """Do what is asked for, once for each rule and layer that fails for the first time.

        Args:
            row: the latest step, with what began in it.

        Raises:
            ModelHealthError: where that is to raise.
        """
        if self._on_violation is None or not row.began:
            return
        violations = self.report._judgement.violations
        new = [v for v in violations if (v.check, v.layer) not in self._answered]
        for violation in new:
            self._answered.update((violation.check, layer) for layer in violation.layers)
        if new and self._on_violation == "raise":
            error = self.report._failure()
            assert error is not None
            raise error
        for violation in new:
            if callable(self._on_violation):
                self._on_violation(violation)
            else:
                layer = violation.layer or self.report.observation.model_type
                text = f"{layer} ({violation.check}): {violation.message}"
                warnings.warn(text, ModelHealthWarning, stacklevel=4)
