"""Running statistics are those of the batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.settings import Setting
from pytest_modelhealth.training.monitoring.rules.rule import Breach, Rule, is_short, named, shown

if TYPE_CHECKING:
    from pytest_modelhealth.report import Course, CourseEvent
    from pytest_modelhealth.settings import Settings
    from pytest_modelhealth.training.monitoring.following.follower import Follower


class StatisticsDrift(Rule):
    """A single batch that stands out is forgotten within some steps."""

    name = "statistics_drift"
    summary = "The running variance of a batch norm stays near that of its usual batches."
    rank = 92
    role = "buffers"
    definition = (
        "The root of the running variance of a batch norm in training mode, the least of the "
        "latest, by the geometric mean of the standard deviations of its inputs so far, over ten "
        "watched steps and to the end. More than max_running_drift is a violation."
    )
    source = "batches on another scale enter the average and dominate it, and evaluation with it"
    settings = (
        Setting(
            "max_running_drift",
            float,
            default=100.0,
            minimum=1.0,
            help="largest running standard deviation by the usual one of a batch",
        ),
    )

    def follower(self) -> Follower:
        """Return what sees the steps."""
        from pytest_modelhealth.training.monitoring.following.buffers import BufferFollower

        return BufferFollower(self.name)

    def assess(self, event: CourseEvent, course: Course, settings: Settings) -> Breach | None:
        """Return what is wrong with running statistics."""
        limit = settings.limit("max_running_drift", event.layer)
        drift = event.value / event.reference if event.reference else 0.0
        if is_short(event) or drift <= limit.value:
            return None
        return Breach(
            f"the running statistics of {named(event)} are far from its usual batches since step "
            f"{event.step}: the running standard deviation is {shown(event.value)}, that of a "
            f"usual input {shown(event.reference)}",
            drift,
            limit,
            cause="some batches are on another scale and dominate the average: evaluation mode "
            "normalises with it",
        )
