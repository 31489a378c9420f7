"""Updates stay a small part of the weights that they change."""

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

_PATIENT = 20
_HIGH = 1e-2
_LONG = 100


class UpdateRatio(Rule):
    """Weights that begin at zero may grow at first."""

    name = "update_ratio"
    summary = "No optimizer goes on changing a weight matrix by a large part of its size."
    rank = 85
    role = "parameters"
    definition = (
        "The norm of an update of a layer's matrices by that of the matrices before, the least of "
        "the latest steps that changed them, over twenty watched steps and after a warm-up of ten. "
        "More than max_update_ratio to the end is a violation, which warns where the loss is near "
        "its best. Above 1e-2 over a hundred steps it warns where the loss is where it began."
    )
    source = "the usual ratio is about 1e-3 (Karpathy, CS231n notes)"
    settings = (
        Setting(
            "max_update_ratio",
            float,
            default=0.1,
            minimum=0.0,
            help="largest update of a weight matrix by its size, both L2 norms, step after step",
        ),
    )

    def follower(self) -> Follower:
        """Return what sees the steps."""
        from pytest_modelhealth.training.monitoring.following.updating import RatioFollower

        return RatioFollower(self.name)

    def assess(self, event: CourseEvent, course: Course, settings: Settings) -> Breach | None:
        """Return what is wrong with updates that stay large."""
        if is_short(event, _PATIENT):
            return None
        limit = settings.limit("max_update_ratio", event.layer)
        since = f"since step {event.step}"
        cause = "the learning rate is too large for these weights"
        if event.value > limit.value:
            return Breach(
                f"each step changes the weights of {named(event)} by {shown(event.value)} of "
                f"their norm, {since}",
                event.value,
                limit,
                sort_of(event, course),
                cause=cause,
            )
        if event.value > _HIGH and event.rows >= _LONG and course.loss.is_flat:
            return Breach(
                f"each step changes the weights of {named(event)} by {shown(event.value)} of "
                f"their norm, {since}, and the loss is where it began",
                event.value,
                severity="warn",
                cause=cause,
            )
        return None
