"""A layer that learns goes on learning while the others do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.settings import Setting
from pytest_modelhealth.training.monitoring.rules.rule import Breach, Rule, known, named, shown

if TYPE_CHECKING:
    from pytest_modelhealth.report import Course, CourseEvent
    from pytest_modelhealth.settings import Settings
    from pytest_modelhealth.training.monitoring.following.follower import Follower

_MOST = 0.5
_SAID = {
    "frozen": (
        "its parameters no longer have requires_grad",
        "it was frozen in the middle of the training: waive it if that is meant",
    ),
    "rate_zero": (
        "its learning rate is zero",
        "its schedule or its group's factor falls to zero: waive it if that is meant",
    ),
}
"""What was said in so many words, and may be meant."""


class StoppedUpdates(Rule):
    """Frozen layers, and those whose rate a schedule brings to zero, may stand still."""

    name = "stopped_updates"
    summary = "No layer that moved stands still while it has gradients and others move."
    rank = 86
    role = "parameters"
    definition = (
        "How many watched steps in a row, to the end, left a layer's parameters exactly as they "
        "were, of those in which it had gradients, its learning rate was not zero, and others "
        "changed. More than max_still_steps is a violation. One that no optimizer steps any "
        "longer, but that still requires gradients, fails over at least half of the training, and "
        "warns before; so does one that was frozen, or whose learning rate is zero."
    )
    source = "an update that is exactly zero is rounded away, masked or never written"
    settings = (
        Setting(
            "max_still_steps",
            int,
            default=30,
            minimum=1,
            help="how many watched steps in a row may leave a layer that learns as it is",
        ),
    )

    def follower(self) -> Follower:
        """Return what sees the steps."""
        from pytest_modelhealth.training.monitoring.following.updating import StillFollower

        return StillFollower(self.name)

    def assess(self, event: CourseEvent, course: Course, settings: Settings) -> Breach | None:
        """Return what is wrong with a layer that stands still."""
        limit = settings.limit("max_still_steps", event.layer)
        if event.recovered or event.rows <= limit.value:
            return None
        rate = event.facts.get("rate", float("nan"))
        if event.kind in _SAID:
            what, why = _SAID[event.kind]
            return Breach(
                f"{named(event)} is no longer updated since step {event.step}, over {event.rows} "
                f"watched steps, while others are: {what}",
                float(event.rows),
                limit,
                "warn",
                cause=why,
            )
        if event.kind == "left_out":
            return Breach(
                f"no optimizer steps {named(event)} any longer since step {event.step}, over "
                f"{event.rows} watched steps, though it requires gradients and has them",
                float(event.rows),
                limit,
                "fail" if event.rows >= _MOST * course.steps else "warn",
                cause="it was left out when the optimizer was made anew; a layer that is meant to "
                "rest is frozen by requires_grad_(False)",
            )
        at = f", at a learning rate of {shown(rate)}" if known(rate) else ""
        return Breach(
            f"the parameters of {named(event)} stand still since step {event.step}, over "
            f"{event.rows} watched steps{at}, though it has gradients and other layers move",
            float(event.rows),
            limit,
            cause="updates are too small for its dtype and rounded away, or its tensors are not "
            "those that the optimizer holds",
        )
