"""The loss does not rise far above its best to stay there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.settings import Setting
from pytest_modelhealth.training.monitoring.rules.rule import PATIENCE, Breach, Rule, shown

if TYPE_CHECKING:
    from pytest_modelhealth.report import Course, CourseEvent
    from pytest_modelhealth.settings import Settings
    from pytest_modelhealth.training.monitoring.following.follower import Follower

_LARGE = 0.03
_LEAPS = 5.0
_SOME = 5e-3
_DOUBLE = 2.0
_WIDE = 10.0
_STEEP = 30.0
_LOST, _WORSE = 50.0, 5.0
_PATIENT = 2 * PATIENCE


class LossDivergence(Rule):
    """What was learnt is not lost again."""

    name = "loss_divergence"
    summary = "The loss does not rise far above its best level and stay there."
    rank = 81
    role = "loss"
    definition = (
        "The rise of the loss, as a running median, above its best, by the largest of what it had "
        "fallen by, ten times its own noise and, where it is never negative, its level at the "
        "beginning. It fails above max_loss_rise, and from max_lost_progress of what was gained on "
        "where updates or gradients leapt with it; without such a sign the latter warns, unless "
        "the loss is fifty times its best, five times its first level, and never negative. Over "
        "by the end, or with several optimizers in a step, it is no violation."
    )
    source = (
        "losses of reinforcement and adversarial learning rise in healthy trainings, by up to "
        "a hundred times; what sets divergence apart is the size of the updates that go with it"
    )
    settings = (
        Setting(
            "max_loss_rise",
            float,
            default=1000.0,
            minimum=0.0,
            help="largest rise of the loss above its best, by its own scale, whatever goes with it",
            per_layer=False,
        ),
        Setting(
            "max_lost_progress",
            float,
            default=0.8,
            minimum=0.0,
            help="largest part of what the loss had gained that may be lost again, where updates "
            "or gradients leap with it",
            per_layer=False,
        ),
    )

    def follower(self) -> Follower:
        """Return what sees the steps."""
        from pytest_modelhealth.training.monitoring.following.divergence import DivergenceFollower

        return DivergenceFollower(self.name)

    def assess(self, event: CourseEvent, course: Course, settings: Settings) -> Breach | None:
        """Return what is wrong with a loss that is above its best."""
        if event.recovered or event.rows < PATIENCE:
            return None
        facts, loss = event.facts, course.loss
        gained = facts["first"] - event.reference
        start = abs(facts["first"]) if loss.never_negative else 0.0
        scale = max(gained, start, _WIDE * facts["noise"], 1e-12)
        rise = event.value - event.reference
        risen, limit = rise / scale, settings["max_loss_rise"]
        text = (
            f"the loss rose from {shown(event.reference)}, its best at step "
            f"{facts['best_step']:.0f}, to {shown(event.value)}, and stayed there since step "
            f"{event.step}"
        )
        if risen > limit.value:
            return Breach(text, risen, limit, cause=_cause(event))
        gain = gained if gained > 0.3 * max(start, _WIDE * facts["noise"]) else scale
        lost, least = rise / gain, settings["max_lost_progress"]
        if lost < least.value or rise < _WIDE * facts["noise"]:
            return None
        if is_unstable(event):
            return Breach(text, lost, least, cause=_cause(event))
        if event.rows < _PATIENT or course.most_optimizer_steps > 1:
            return None
        if (
            loss.never_negative
            and event.value > _LOST * event.reference
            and event.value > _WORSE * abs(facts["first"])
        ):
            return Breach(text, lost, least, cause="steps are too large, and add up")
        why = "the model diverged, or what it learns changed: its data, its targets, its rewards"
        return Breach(text, lost, least, severity="warn", cause=why)


def is_unstable(event: CourseEvent) -> bool:
    """Whether updates or gradients are out of all proportion while the loss is high."""
    facts = event.facts
    ratio, growth = facts["update_ratio"], facts["update_growth"]
    leaps = (ratio > _LARGE and growth > _DOUBLE) or (ratio > _SOME and growth > _LEAPS)
    return leaps or ratio > _WIDE * _SOME * 2 or facts["gradient_growth"] > _STEEP


def _cause(event: CourseEvent) -> str:
    facts = event.facts
    if facts["gradient_growth"] > _STEEP:
        return f"gradients grew {facts['gradient_growth']:.3g}-fold with it: the step is too large"
    return (
        f"updates of up to {facts['update_ratio']:.2g} of the weights go with it: the learning "
        "rate is too large"
    )
