"""Layers that were alive do not die."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.settings import Setting
from pytest_modelhealth.training.monitoring.rules.rule import (
    Breach,
    Rule,
    is_short,
    named,
    shown,
    sort_of,
)

if TYPE_CHECKING:
    from pytest_modelhealth.report import Course, CourseEvent
    from pytest_modelhealth.settings import Settings
    from pytest_modelhealth.training.monitoring.following.follower import Follower


class DyingLayers(Rule):
    """A third of dead units is no fault; nearly all are."""

    name = "dying_layers"
    summary = "No layer loses nearly all its units, or the spread of its output."
    rank = 83
    definition = (
        "The part of a layer's units that is active in none of at least 16 values of a batch, the "
        "least of the latest steps, where it once was below one half; and the largest of the "
        "latest standard deviations of a layer's output relative to the geometric mean so far, "
        "where its input kept its spread. Both over ten watched steps and to the end."
    )
    source = (
        "10 to 30 % of dead ReLU units are common in healthy networks (CS231n notes); with 90 % "
        "a layer has lost its width"
    )
    settings = (
        Setting(
            "max_dying_fraction",
            float,
            default=0.9,
            minimum=0.0,
            maximum=1.0,
            help="largest part of a layer's units that may die in the course of a training",
        ),
        Setting(
            "min_spread_kept",
            float,
            default=1e-3,
            minimum=0.0,
            help="least of its usual standard deviation that a layer's output keeps",
        ),
    )

    def follower(self) -> Follower:
        """Return what sees the steps."""
        from pytest_modelhealth.training.monitoring.following.dying import DyingFollower

        return DyingFollower(self.name)

    def assess(self, event: CourseEvent, course: Course, settings: Settings) -> Breach | None:
        """Return what is wrong with a layer that dies."""
        if is_short(event):
            return None
        if event.kind == "units":
            limit = settings.limit("max_dying_fraction", event.layer)
            if event.value <= limit.value:
                return None
            return Breach(
                f"{event.value:.0%} of the units of {named(event)} are dead since step "
                f"{event.step}; they were {event.reference:.0%}",
                event.value,
                limit,
                cause="a step too large pushed its biases below all inputs, or its inputs shifted",
            )
        if any((e.kind, e.layer) == ("units", event.layer) for e in course.events):
            return None
        limit = settings.limit("min_spread_kept", event.layer)
        kept = event.value / event.reference if event.reference else 1.0
        if kept >= limit.value:
            return None
        return Breach(
            f"the output of {named(event)} became constant: its standard deviation fell to "
            f"{shown(kept)} of what was usual since step {event.step}, that of its input did not",
            kept,
            limit,
            sort_of(event, course),
            cause="it saturates, or its weights shrank to nothing",
        )
