"""Bounded activations that were free do not come to stay at their ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.settings import Setting
from pytest_modelhealth.training.monitoring.rules.rule import Breach, Rule, is_short, named, shown

if TYPE_CHECKING:
    from pytest_modelhealth.report import Course, CourseEvent
    from pytest_modelhealth.settings import Settings
    from pytest_modelhealth.training.monitoring.following.follower import Follower

_PART = 0.5


class SaturatingLayers(Rule):
    """An output that is certain of data it knows by heart is none; nor is a gate that closes."""

    name = "saturating_layers"
    summary = "No softmax, sigmoid or tanh comes to give nothing but the ends of its range."
    rank = 93
    definition = (
        "How near the values of a bounded activation are to the ends of its range, from 0 to 1: "
        "the mean square of tanh; the mean of squares by the mean for softmax, 1 where each row "
        "has a single 1; and 1 - 4 E[s(1 - s)] for sigmoid. The least of the latest values, where "
        "it began below 0.7, over ten watched steps and to the end. More than max_saturating is a "
        "violation where the loss never is negative and still above half of its first level, and "
        "warns where it is above its floor."
    )
    source = "at its ends the slope is next to zero, and nothing before it learns any longer"
    settings = (
        Setting(
            "max_saturating",
            float,
            default=0.995,
            minimum=0.0,
            maximum=1.0,
            help="how near a bounded activation may come to the ends of its range in a training",
        ),
    )

    def follower(self) -> Follower:
        """Return what sees the steps."""
        from pytest_modelhealth.training.monitoring.following.saturating import SaturationFollower

        return SaturationFollower(self.name)

    def assess(self, event: CourseEvent, course: Course, settings: Settings) -> Breach | None:
        """Return what is wrong with an activation that saturates."""
        limit, loss = settings.limit("max_saturating", event.layer), course.loss
        if is_short(event) or event.value <= limit.value or loss.is_at_floor:
            return None
        is_stuck = loss.is_known and loss.never_negative and loss.recent > _PART * loss.first
        return Breach(
            f"{named(event)} saturates since step {event.step}: its values are at the ends of "
            f"their range to {event.value:.1%}, at first to {shown(100 * event.reference)}%",
            event.value,
            limit,
            "fail" if is_stuck else "warn",
            cause="its inputs grow without a bound: a softmax is one-hot, a sigmoid or tanh flat, "
            "and gradients vanish there",
        )
