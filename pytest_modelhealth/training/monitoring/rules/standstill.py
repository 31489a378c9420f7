"""A training changes weights, and the loss with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.settings import Setting
from pytest_modelhealth.training.monitoring.rules.rule import (
    Breach,
    Rule,
    known,
    shown,
)

if TYPE_CHECKING:
    from pytest_modelhealth.report import Course, CourseEvent, Observation
    from pytest_modelhealth.settings import Limit, Settings
    from pytest_modelhealth.training.monitoring.following.follower import Follower

_LONG = 5
_MOST = 0.4
_NO_RATE = 1e-7
_NOISY = 0.3
_OFTEN = 4


class Standstill(Rule):
    """Something is learnt, or there is nothing to learn."""

    name = "standstill"
    summary = "Over a training gradients come, weights change, and the loss moves."
    rank = 88
    role = "parameters"
    definition = (
        "How many watched steps there were from the first on without any gradient, or without any "
        "change of any parameter though gradients came: more than max_steps_standing is a "
        "violation, and so is as long a pause of the optimizers later on, if it is four times as "
        "long as any before. A loss that after five times as many is where it began warns, where "
        "it is not next to 0, never negative, and not mostly noise."
    )
    source = "accumulation of gradients over more than 20 batches is rare"
    settings = (
        Setting(
            "max_steps_standing",
            int,
            default=20,
            minimum=1,
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

    def follower(self) -> Follower:
        """Return what sees the steps."""
        from pytest_modelhealth.training.monitoring.following.standing import StandingFollower

        return StandingFollower(self.name)

    def assess(self, event: CourseEvent, course: Course, settings: Settings) -> Breach | None:
        """Return what is wrong with a training that stands still."""
        limit, loss = settings["max_steps_standing"], course.loss
        if event.recovered or event.rows <= limit.value or loss.is_at_floor:
            return None
        rows = float(event.rows)
        if event.kind == "weights":
            return Breach(
                f"no parameter changed in {event.rows} watched steps, though gradients came",
                rows,
                limit,
                cause="the optimizer holds other tensors than the model's, never steps, or its "
                "learning rate is 0",
            )
        if event.kind == "gradients":
            return Breach(
                f"no gradient came to any parameter in {event.rows} watched steps",
                rows,
                limit,
                cause="the loss is not computed from the output, backward() is missing, or the "
                "graph is cut between the two",
            )
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
        long = event.rows > _LONG * limit.value
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
        if event.rows < _MOST * course.steps or event.rows <= _OFTEN * event.reference:
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
