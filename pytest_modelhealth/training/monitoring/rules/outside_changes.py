"""Optimizers alone change the weights that they train."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.training.monitoring.rules.rule import Breach, Rule, named, shown

if TYPE_CHECKING:
    from pytest_modelhealth.report import Course, CourseEvent
    from pytest_modelhealth.settings import Settings
    from pytest_modelhealth.training.monitoring.following.follower import Follower


class OutsideChanges(Rule):
    """Bounds that are put on weights in each step belong to a training, and are none."""

    name = "outside_changes"
    summary = "Between two steps nothing but an optimizer changes weights by much."
    rank = 94
    role = "parameters"
    definition = (
        "The change of the norm of a layer's parameters from one watched step to the next, where "
        "both follow each other. The update's norm bounds it, unless something else wrote the "
        "weights. A change by more than three times that and by more than 3 % of the norm, after "
        "twenty steps without one, warns."
    )
    source = "the triangle inequality; reinitialised, averaged and reloaded weights break it"

    def follower(self) -> Follower:
        """Return what sees the steps."""
        from pytest_modelhealth.training.monitoring.following.meddling import MeddlingFollower

        return MeddlingFollower(self.name)

    def assess(self, event: CourseEvent, course: Course, settings: Settings) -> Breach | None:
        """Return what is wrong with weights that jump."""
        times = f", {event.rows} times in all" if event.rows > 1 else ""
        return Breach(
            f"the weights of {named(event)} were replaced or overwritten before step {event.last}: "
            f"their norm jumped from {shown(event.reference)} to {shown(event.value)}, the update "
            f"was {shown(event.facts['update'])}{times}",
            abs(event.value - event.reference),
            severity="warn",
            cause="they were initialised anew, loaded, averaged or scaled by something else",
        )
