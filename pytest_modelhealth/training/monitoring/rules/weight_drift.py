"""Weights keep their order of magnitude."""

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

_CERTAIN = 1000.0


class WeightDrift(Rule):
    """What begins at zero may grow to the size of others."""

    name = "weight_drift"
    summary = "No layer's weights grow without end, or shrink towards zero."
    rank = 87
    role = "parameters"
    definition = (
        "The root mean square of a layer's parameters, by the first one, at least 0.01, where it "
        "is above 1 now; and by the largest one so far. Outside max_weight_growth and "
        "min_weight_kept over ten watched steps and to the end it is a violation, which warns "
        "where the loss is near its best, or was not given, unless it is a factor of 1000."
    )
    source = (
        "scales that start at 1e-6 grow to 0.1, and weights before a normalisation with the root "
        "of the number of steps; weight decay balances both within one order of magnitude"
    )
    settings = (
        Setting(
            "max_weight_growth",
            float,
            default=100.0,
            minimum=1.0,
            help="largest growth of a layer's parameters in the course of a training",
        ),
        Setting(
            "min_weight_kept",
            float,
            default=1e-2,
            minimum=0.0,
            help="least of its largest size that a layer's parameters keep",
        ),
    )

    def follower(self) -> Follower:
        """Return what sees the steps."""
        from pytest_modelhealth.training.monitoring.following.drifting import DriftFollower

        return DriftFollower(self.name)

    def assess(self, event: CourseEvent, course: Course, settings: Settings) -> Breach | None:
        """Return what is wrong with weights that drift."""
        if is_short(event):
            return None
        change = event.value / event.reference if event.reference else 1.0
        sizes = f"from {shown(event.reference)} to {shown(event.value)} (rms)"
        if event.kind == "growth":
            limit = settings.limit("max_weight_growth", event.layer)
            if change <= limit.value:
                return None
            text = f"the parameters of {named(event)} grew {shown(change)}-fold, {sizes}"
            cause = "steps are too large, and nothing bounds these weights"
        else:
            limit = settings.limit("min_weight_kept", event.layer)
            if change >= limit.value:
                return None
            text = f"the parameters of {named(event)} shrank to {shown(change)}, {sizes}"
            cause = "weight decay outweighs what the loss asks for"
        return Breach(
            f"{text}; it passed a tenth of that in step {event.step}",
            change,
            limit,
            "fail" if not 1.0 / _CERTAIN <= change <= _CERTAIN else sort_of(event, course),
            cause,
        )
