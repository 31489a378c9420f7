"""`CourseObserver`: has every rule follow a training, and tells what began."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pytest_modelhealth.checks import Check
from pytest_modelhealth.report import Course, CourseEvent
from pytest_modelhealth.settings import Settings
from pytest_modelhealth.training.monitoring.following.table import Table
from pytest_modelhealth.training.monitoring.row import StepRow
from pytest_modelhealth.training.monitoring.rules.rule import Breach, Rule


@dataclass(frozen=True)
class Begun:
    """What a rule finds wrong for the first time.

    Args:
        event: what began.
        breach: what is wrong with it.
    """

    event: CourseEvent
    breach: Breach

    def __str__(self) -> str:
        return f"{self.event.rule}: {self.breach.message}"


class CourseObserver:
    """Follows a training for the rules among checks.

    Args:
        checks: the checks that judge it.
        settings: the limits in force.
    """

    def __init__(self, checks: Iterable[Check], settings: Settings) -> None:
        chosen = (c for c in checks if isinstance(c, Rule) and settings.chooses(c.name))
        self._followed = [(rule, rule.follower()) for rule in chosen]
        self._settings = settings
        self._table = Table()
        self._told: set[tuple[str, ...]] = set()
        self._first_step: int | None = None
        self._passes = self._optimizer_steps = self._most = 0

    def follow(self, row: StepRow) -> list[Begun]:
        """See a step, and return what is wrong since now."""
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
                    begun.append(Begun(event, breach))
        return begun

    def steps_of_breaches(self) -> dict[str, int]:
        """Return the step in which each breach began that stands now, by its message."""
        course = self.course
        rules = {rule.name: rule for rule, _ in self._followed}
        found: dict[str, int] = {}
        for event in course.events:
            breach = rules[event.rule].assess(event, course, self._settings)
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
