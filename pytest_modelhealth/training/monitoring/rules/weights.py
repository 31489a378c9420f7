"""Rules for weights: how far each step moves them, and that something does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.settings import Count, Factor, Ratio
from pytest_modelhealth.training.monitoring.rules.rule import (
    Breach,
    Rule,
    is_short,
    known,
    named,
    shown,
    sort_of,
)

if TYPE_CHECKING:
    from pytest_modelhealth.report import Course, CourseEvent, Observation
    from pytest_modelhealth.settings import Limit, Settings


_PATIENT = 20
_HIGH = 1e-2
_LONG = 100


class UpdateRatio(Rule):
    """Weights that begin at zero may grow at first."""

    name = "update_ratio"
    follows = "weights:RatioFollower"
    summary = "No optimizer goes on changing a weight matrix by a large part of its size."
    rank = 85
    role = "parameters"
    settings = (
        Ratio(
            "max_update_ratio",
            default=0.1,
            help="largest update of a weight matrix by its size, both L2 norms, step after step",
        ),
    )

    def assess(self, event: CourseEvent, course: Course, settings: Settings) -> Breach | None:
        """Return what is wrong with updates that stay large."""
        if is_short(event, _PATIENT):
            return None
        limit = settings.limit("max_update_ratio", event.layer)
        is_over = event.value > limit.value
        is_high = event.value > _HIGH and event.rows >= _LONG and course.loss.is_flat
        if not (is_over or is_high):
            return None
        return Breach(
            f"each step changes the weights of {named(event)} by {shown(event.value)} of "
            f"their norm, since step {event.step}"
            f"{'' if is_over else ', and the loss is where it began'}",
            event.value,
            limit if is_over else None,
            sort_of(event, course) if is_over else "warn",
            cause="the learning rate is too large for these weights",
        )


_CERTAIN = 1000.0


class WeightDrift(Rule):
    """What begins at zero may grow to the size of others."""

    name = "weight_drift"
    follows = "weights:DriftFollower"
    summary = "No layer's weights grow without end, or shrink towards zero."
    rank = 87
    role = "parameters"
    settings = (
        Factor(
            "max_weight_growth",
            default=100.0,
            help="largest growth of a layer's parameters in the course of a training",
        ),
        Ratio(
            "min_weight_kept",
            default=1e-2,
            help="least of its largest size that a layer's parameters keep",
        ),
    )

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
    follows = "weights:StillFollower"
    summary = "No layer that moved stands still while it has gradients and others move."
    rank = 86
    role = "parameters"
    settings = (
        Count(
            "max_still_steps",
            default=30,
            help="how many watched steps in a row may leave a layer that learns as it is",
        ),
    )

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


_STANDSTILL_LONG = 5
_STANDSTILL_MOST = 0.4
_NO_RATE = 1e-7
_NOISY = 0.3
_OFTEN = 4


_NONE_CAME = {
    "weights": (
        "no parameter changed in {} watched steps, though gradients came",
        (
            "the optimizer holds other tensors than the model's, never steps, or its learning "
            "rate is 0"
        ),
    ),
    "gradients": (
        "no gradient came to any parameter in {} watched steps",
        (
            "the loss is not computed from the output, backward() is missing, or the graph is cut "
            "between the two"
        ),
    ),
}
"""What is wrong from the first step on, and the likely cause."""


class Standstill(Rule):
    """Something is learnt, or there is nothing to learn."""

    name = "standstill"
    follows = "weights:StandingFollower"
    summary = "Over a training gradients come, weights change, and the loss moves."
    rank = 88
    role = "parameters"
    settings = (
        Count(
            "max_steps_standing",
            default=20,
            help="how many watched steps at the beginning may pass without a gradient, or without "
            "a change of the weights",
            per_layer=False,
        ),
    )

    def run(self, observation: Observation, settings: Settings) -> Iterator[Finding]:
        """Yield what stands still, or that nothing was seen of a training."""
        course = observation.course
        if course is not None and not course.passes and course.steps:
            reason = (
                f"no forward pass was seen in {course.steps} watched steps: the loop must train "
                "this very object, with gradients on, before step_end()"
            )
            yield self.inconclusive(place(observation), reason)
        yield from super().run(observation, settings)

    def assess(self, event: CourseEvent, course: Course, settings: Settings) -> Breach | None:
        """Return what is wrong with a training that stands still."""
        limit, loss = settings["max_steps_standing"], course.loss
        if event.recovered or event.rows <= limit.value or loss.is_at_floor:
            return None
        rows = float(event.rows)
        if event.kind in _NONE_CAME:
            what, cause = _NONE_CAME[event.kind]
            return Breach(what.format(event.rows), rows, limit, cause=cause)
        if event.kind == "stopped":
            return self._stopped(event, course, limit)
        if event.kind == "rare":
            if event.rows < course.steps / 4:
                return None
            return Breach(
                f"an optimizer hardly steps any longer since step {event.step}: in "
                f"{event.value:.0%} of the latest watched steps, in {event.reference:.0%} of the "
                "first, though gradients came",
                event.value,
                severity="warn",
                cause="the loop skips or postpones updates: a condition on the loss, a scaler, or "
                "a count of batches",
            )
        if event.kind == "idle":
            if event.rows <= max(limit.value, _OFTEN * event.reference):
                return None
            return Breach(
                f"no optimizer took a step since step {event.step}, over {event.rows} watched "
                "steps, though gradients came",
                rows,
                limit,
                cause="a gradient scaler skips every step, as gradients are not finite, or the "
                "loop no longer calls step()",
            )
        is_clear = loss.never_negative and loss.noise < _NOISY * abs(loss.first)
        long = event.rows > _STANDSTILL_LONG * limit.value
        if not (is_clear and long) or course.most_optimizer_steps > 1:
            return None
        return Breach(
            f"the loss is where it began after {event.rows} watched steps: {shown(loss.recent)}",
            rows,
            severity="warn",
            cause="updates are too small or too large, the targets do not belong to the inputs, or "
            "the output does not depend on them",
        )

    def _stopped(self, event: CourseEvent, course: Course, limit: Limit) -> Breach | None:
        """Return what is wrong with weights that no longer change."""
        if event.rows < _STANDSTILL_MOST * course.steps or event.rows <= _OFTEN * event.reference:
            return None
        rate = event.facts["rate"]
        if known(rate):
            why = (
                f"the learning rate is {shown(rate)}: its schedule ended, or counts other steps"
                if rate < _NO_RATE
                else "updates are too small for the weights' dtype: the learning rate is, or "
                "gradients are clipped or scaled to nothing"
            )
        else:
            why = "the optimizer no longer steps, or holds other tensors than the model's"
        return Breach(
            f"no parameter changed any longer since step {event.step}, over {event.rows} watched "
            f"steps, though gradients came; the loss is {shown(course.loss.recent)}",
            float(event.rows),
            limit,
            cause=why,
        )


class OutsideChanges(Rule):
    """Bounds that are put on weights in each step belong to a training, and are none."""

    name = "outside_changes"
    follows = "weights:MeddlingFollower"
    summary = "Between two steps nothing but an optimizer changes weights by much."
    rank = 94
    role = "parameters"

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
