"""The rules follow a training: what began in each step, its report, and what is done at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import numpy as np

from pytest_modelhealth.checks import Check
from pytest_modelhealth.errors import InspectionError, ModelHealthWarning
from pytest_modelhealth.report import Course, Finding, HealthReport, Observation
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.training.monitoring.course import Follower, Table
from pytest_modelhealth.training.monitoring.row import Event, StepRow
from pytest_modelhealth.training.monitoring.rules import RULES

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
        self._table = table = Table()
        checks = [c for c in settings.checks if isinstance(c, Check) and settings.chooses(c.name)]
        self._followers = [
            Follower(check.name, check.role, table, RULES[check.name].see)
            for check in checks
            if check.name in RULES
        ]
        self._began: set[tuple[str, ...]] = set()  # rule, kind, layer and severity
        self._answered: set[tuple[str, str]] = set()
        self._observation: Observation | None = None
        self._report: HealthReport | None = None

    def follow(self, row: StepRow, observation: Observation) -> StepRow:
        """See a step, and return it with what began in it, a phrase each.

        Args:
            row: its numbers.
            observation: what was seen of it.
        """
        self._observation, self._report = observation, None
        self._table.take(row)
        with np.errstate(all="ignore"):
            for follower in self._followers:
                follower.follow()
        began = []
        course: Course | None = None
        for event in [event for follower in self._followers for event in follower.changed]:
            key = event.rule, event.kind, event.layer
            if (*key, "fail") in self._began:
                continue
            course = course or self._table.course()
            breach = RULES[event.rule].assess(event, course, self._settings)
            if breach is not None and (*key, breach.grade) not in self._began:
                self._began.add((*key, breach.grade))
                began.append(f"{event.rule}: {breach.message}")
        return replace(row, began=tuple(began)) if began else row

    @property
    def course(self) -> Course:
        """How the training went so far."""
        return self._table.course(e for f in self._followers for e in f.events.values())

    @property
    def report(self) -> HealthReport:
        """The report of the training so far: the latest step, with its course."""
        assert self._observation is not None
        if self._report is None:
            self._report = self._make_report(replace(self._observation, course=self.course))
        return self._report

    @property
    def events(self) -> tuple[Event, ...]:
        """What rules object to, the gravest first, each with the step it began in."""
        if self._observation is None:
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
