"""A model that trains in training mode goes on doing so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.settings import Setting
from pytest_modelhealth.training.monitoring.rules.rule import Breach, Rule, named

if TYPE_CHECKING:
    from pytest_modelhealth.report import Course, CourseEvent
    from pytest_modelhealth.settings import Settings
    from pytest_modelhealth.training.monitoring.following.follower import Follower


class ModeSwitch(Rule):
    """Layers that are in evaluation mode from the start may be held there on purpose."""

    name = "mode_switch"
    summary = "A model that trains in training mode does not go on in evaluation mode."
    rank = 90
    definition = (
        "For how many watched steps in a row, to the end, a model with dropout or batch norm made "
        "its forward passes in evaluation mode, after it was in training mode. More than "
        "max_steps_in_evaluation is a violation. Single layers that are switched, as batch norms "
        "that are frozen late, warn."
    )
    source = "model.eval() of a validation without model.train() after it"
    settings = (
        Setting(
            "max_steps_in_evaluation",
            int,
            default=20,
            minimum=1,
            help="how many watched steps in a row may be trained in evaluation mode after some in "
            "training mode",
            per_layer=False,
        ),
    )

    def follower(self) -> Follower:
        """Return what sees the steps."""
        from pytest_modelhealth.training.monitoring.following.modes import ModeFollower

        return ModeFollower(self.name)

    def assess(self, event: CourseEvent, course: Course, settings: Settings) -> Breach | None:
        """Return what is wrong with a switch to evaluation mode."""
        limit = settings["max_steps_in_evaluation"]
        if event.recovered or event.rows <= limit.value:
            return None
        if event.layer:
            whole = any(e.rule == self.name and not e.layer for e in course.events)
            if whole:
                return None
        return Breach(
            f"{named(event)} trains in evaluation mode since step {event.step}, over {event.rows} "
            f"watched steps; it was in training mode over {event.reference:.0f}",
            float(event.rows),
            limit,
            "warn" if event.layer else "fail",
            cause="a validation called eval(), and train() is not called after it: dropout is off, "
            "and batch norms use their running statistics, which no longer follow",
        )
