"""Hooks are registered once, not in every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.settings import Setting
from pytest_modelhealth.training.monitoring.rules.rule import Breach, Rule, named

if TYPE_CHECKING:
    from pytest_modelhealth.report import Course, CourseEvent
    from pytest_modelhealth.settings import Settings
    from pytest_modelhealth.training.monitoring.following.follower import Follower


class GrowingHooks(Rule):
    """Hooks that are removed again may be registered in each step."""

    name = "growing_hooks"
    summary = "No layer gets more forward hooks in every step."
    rank = 91
    definition = (
        "In how many watched steps in a row, to the end, a layer had more forward hooks than in "
        "the one before. More than max_rising_steps is a violation."
    )
    source = "a hook that is registered in the loop and never removed runs once more in each step"
    settings = (
        Setting(
            "max_rising_steps",
            int,
            default=20,
            minimum=1,
            help="in how many watched steps in a row a layer may get more hooks",
        ),
    )

    def follower(self) -> Follower:
        """Return what sees the steps."""
        from pytest_modelhealth.training.monitoring.following.modes import HookFollower

        return HookFollower(self.name)

    def assess(self, event: CourseEvent, course: Course, settings: Settings) -> Breach | None:
        """Return what is wrong with a rising number of hooks."""
        limit = settings.limit("max_rising_steps", event.layer)
        if event.recovered or event.rows <= limit.value:
            return None
        return Breach(
            f"{named(event)} gets more forward hooks in every step since step {event.step}: it has "
            f"{event.value:.0f} now",
            float(event.rows),
            limit,
            cause="a hook is registered in the training loop and not removed: each one runs on top "
            "of those before",
        )
