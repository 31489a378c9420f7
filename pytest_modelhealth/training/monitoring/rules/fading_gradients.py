"""Gradients do not fall to nothing while there is something to learn."""

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
_MOST = 0.5


class FadingGradients(Rule):
    """Gradients that fade with the loss are those of a model that has learnt."""

    name = "fading_gradients"
    summary = "No gradient falls to nothing while the loss is neither low nor near its best."
    rank = 84
    definition = (
        "The largest of the latest gradient norms of a layer, by that of the whole model, relative "
        "to the geometric mean of this share so far; of the whole model, relative to its own; and "
        "for how many watched steps a layer that had a gradient has none or zero. The first two "
        "break min_gradient_kept, the last max_steps_without_gradient. A layer's fading warns "
        "where the loss is near its best, and so does a gradient that is missing, unless the layer "
        "is called and that lasts for half of the training."
    )
    source = (
        "healthy layers keep their share of the gradient within two orders of magnitude; gradients "
        "of a model that knows its data by heart vanish with the loss"
    )
    settings = (
        Setting(
            "min_gradient_kept",
            float,
            default=1e-4,
            minimum=0.0,
            help="least of its usual size that a gradient keeps while the loss is not low",
        ),
        Setting(
            "max_steps_without_gradient",
            int,
            default=30,
            minimum=1,
            help="how many watched steps in a row a layer that had a gradient may go without",
        ),
    )

    def follower(self) -> Follower:
        """Return what sees the steps."""
        from pytest_modelhealth.training.monitoring.following.fading import FadingFollower

        return FadingFollower(self.name)

    def assess(self, event: CourseEvent, course: Course, settings: Settings) -> Breach | None:
        """Return what is wrong with a gradient that fades, or is gone."""
        if event.recovered:
            return None
        if event.kind in ("zero", "missing"):
            return self._cut(event, course, settings)
        loss = course.loss
        if event.kind == "all_zero":
            return self._all_zero(event, course)
        if is_short(event, _PATIENT):
            return None
        limit = settings.limit("min_gradient_kept", event.layer)
        kept = event.value / event.reference if event.reference else 0.0
        if event.kind == "never":
            if not loss.is_flat or loss.is_at_floor or kept >= limit.value / 100:
                return None
            return Breach(
                f"the gradients of {named(event)} are {shown(kept)} of the largest by their "
                f"weights, since step {event.step}, and the loss stays where it was",
                kept,
                limit,
                cause="what lies behind this layer hardly passes gradients: it saturates",
            )
        if kept >= limit.value:
            return None
        if event.kind == "all":
            if loss.is_well:
                return None
            return Breach(
                f"all gradients fell to {shown(kept)} of what was usual since step {event.step}, "
                f"while the loss is {shown(loss.recent)}, its best {shown(loss.best)}",
                kept,
                limit,
                sort_of(event, course),
                cause="what the loss is made of saturates: it no longer tells how to improve",
            )
        return Breach(
            f"the gradients of {named(event)} fell to {shown(kept)} of their usual share of all "
            f"since step {event.step}",
            kept,
            limit,
            sort_of(event, course),
            cause="a layer behind it saturates, or its outputs no longer matter",
        )

    def _all_zero(self, event: CourseEvent, course: Course) -> Breach | None:
        loss = course.loss
        if event.rows < _PATIENT or loss.is_at_floor or loss.is_well:
            return None
        return Breach(
            f"every gradient is exactly zero since step {event.step}, while the loss is "
            f"{shown(loss.recent)}",
            0.0,
            severity="fail" if loss.is_known else "warn",
            cause="the output no longer depends on the weights: all units are dead or saturated, "
            "or the loss is clamped",
        )

    def _cut(self, event: CourseEvent, course: Course, settings: Settings) -> Breach | None:
        limit = settings.limit("max_steps_without_gradient", event.layer)
        if event.rows <= limit.value:
            return None
        is_zero = event.kind == "zero"
        is_long = event.rows >= _MOST * course.steps and event.facts["is_called"] > 0.0
        what = "are exactly zero" if is_zero else "are missing"
        return Breach(
            f"the gradients of {named(event)} {what} since step {event.step}, over {event.rows} "
            "watched steps, while others have theirs",
            float(event.rows),
            limit,
            sort_of(event, course) if is_zero else "fail" if is_long else "warn",
            cause="what it makes is dead behind it, or no longer reaches the loss",
        )
