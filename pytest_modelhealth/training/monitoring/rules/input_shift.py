"""The model goes on being given inputs of one kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.settings import Setting
from pytest_modelhealth.training.monitoring.rules.rule import (
    PATIENCE,
    Breach,
    Rule,
    is_short,
    shown,
)

if TYPE_CHECKING:
    from pytest_modelhealth.report import Course, CourseEvent
    from pytest_modelhealth.settings import Settings
    from pytest_modelhealth.training.monitoring.following.follower import Follower

_OTHER = 10.0


class InputShift(Rule):
    """A batch that stands out is none; a curriculum may change the scale a little."""

    name = "input_shift"
    summary = "The inputs of the model do not become constant, nor change their scale for good."
    rank = 89
    role = "inputs"
    definition = (
        "The standard deviation of the model's inputs, by the geometric mean so far. Next to zero "
        "over ten watched steps and to the end is a violation, and so is a change by more than "
        "max_input_shift, up or down; a change by more than 10 warns."
    )
    source = "standardised inputs keep their deviation; augmentation changes it by less than 10"
    settings = (
        Setting(
            "max_input_shift",
            float,
            default=100.0,
            minimum=1.0,
            help="by how much the scale of the model's inputs may change for good, up or down",
            per_layer=False,
        ),
    )

    def follower(self) -> Follower:
        """Return what sees the steps."""
        from pytest_modelhealth.training.monitoring.following.inputs import InputFollower

        return InputFollower(self.name)

    def assess(self, event: CourseEvent, course: Course, settings: Settings) -> Breach | None:
        """Return what is wrong with other inputs."""
        if is_short(event, PATIENCE):
            return None
        limit = settings["max_input_shift"]
        since = f"since step {event.step}"
        if event.kind == "constant":
            return Breach(
                f"all inputs of the model are the same number {since}: their standard deviation is "
                f"{shown(event.value)}, it was {shown(event.reference)}",
                event.value,
                cause="the loader gives blank or constant samples: nothing can be learnt of them",
            )
        change = max(event.value / event.reference, event.reference / event.value)
        if change < min(_OTHER, limit.value):
            return None
        return Breach(
            f"the standard deviation of the model's inputs jumped from {shown(event.reference)} to "
            f"{shown(event.value)} {since}, and stays there",
            change,
            limit,
            "fail" if change > limit.value else "warn",
            cause="the loader no longer standardises its samples, or gives other ones",
        )
