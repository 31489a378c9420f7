"""Gradients and activations stay in the order of magnitude that is usual for their layer."""

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

_HUGE = 1e4
_CERTAIN = 1e6
_GROWN = 100.0
_LARGE = 10.0


class ExplodingSignals(Rule):
    """A spike that passes is none; a branch that begins at zero may grow."""

    name = "exploding_signals"
    summary = "No gradient or activation grows by orders of magnitude over what is usual, to stay."
    rank = 82
    definition = (
        "The least of the latest values of a layer, by the larger of its geometric mean so far and "
        "of its beginning, over ten watched steps and to the end: gradient norms, where that of "
        "the whole model grew fivefold, too, and the root mean square of activations, above 1e4. "
        "It warns where the loss is near its best, or was not given, unless gradients grew by more "
        "than 1e6. Activations above 10 that grew a hundredfold from the first steps on, and in "
        "the last two fifths of a training at the same rate and threefold, fail in any case."
    )
    source = (
        "gradient norms before clipping spike up to a hundredfold in healthy language models and "
        "reinforcement learning; three orders of magnitude for good are divergence"
    )
    settings = (
        Setting(
            "max_gradient_rise",
            float,
            default=1000.0,
            minimum=1.0,
            help="largest growth of a layer's gradient norm over what was usual, for good",
        ),
        Setting(
            "max_activation_rise",
            float,
            default=1000.0,
            minimum=1.0,
            help="largest growth of a layer's activations over what was usual, for good",
        ),
    )

    def follower(self) -> Follower:
        """Return what sees the steps."""
        from pytest_modelhealth.training.monitoring.following.explosion import ExplosionFollower

        return ExplosionFollower(self.name)

    def assess(self, event: CourseEvent, course: Course, settings: Settings) -> Breach | None:
        """Return what is wrong with what grew."""
        if event.kind == "growth":
            return self._growing(event)
        name = "max_gradient_rise" if event.kind == "gradients" else "max_activation_rise"
        limit = settings.limit(name, event.layer)
        growth = event.value / event.reference if event.reference else 0.0
        if is_short(event) or growth <= limit.value:
            return None
        severity = sort_of(event, course)
        if event.kind == "gradients" and growth > _CERTAIN:
            severity = "fail"
        if event.kind == "activations" and event.value < _HUGE:
            if severity == "warn" or not course.loss.is_known:
                return None
            severity = "warn"
        what = "gradient norm" if event.kind == "gradients" else "activations (rms)"
        return Breach(
            f"the {what} of {named(event)} grew {shown(growth)}-fold, from "
            f"{shown(event.reference)} to {shown(event.value)}, and stays there since step "
            f"{event.step}",
            growth,
            limit,
            severity,
            cause="steps are too large for this layer, and nothing bounds what it makes",
        )

    def _growing(self, event: CourseEvent) -> Breach | None:
        """Return what is wrong with what grows exponentially, step after step."""
        growth = event.value / event.reference if event.reference else 0.0
        if is_short(event) or growth <= _GROWN or event.value < _LARGE:
            return None
        return Breach(
            f"the activations (rms) of {named(event)} grow exponentially: {shown(growth)}-fold so "
            f"far, from {shown(event.reference)} to {shown(event.value)}, and "
            f"{shown(event.facts['lately'])}-fold in the last two fifths of the training",
            growth,
            cause="a gain, a scale or a reward of size is multiplied or rewarded without a bound",
        )
