"""Rules for the loss, modes, hooks, inputs and running statistics of a training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.settings import Count, Factor, Ratio
from pytest_modelhealth.training.monitoring.rules.rule import (
    PATIENCE,
    Breach,
    Rule,
    is_short,
    named,
    shown,
)

if TYPE_CHECKING:
    from pytest_modelhealth.report import Course, CourseEvent
    from pytest_modelhealth.settings import Settings


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
    follows = "surroundings:DivergenceFollower"
    summary = "The loss does not rise far above its best level and stay there."
    rank = 81
    role = "loss"
    settings = (
        Ratio(
            "max_loss_rise",
            default=1000.0,
            help="largest rise of the loss above its best, by its own scale, whatever goes with it",
            per_layer=False,
        ),
        Ratio(
            "max_lost_progress",
            default=0.8,
            help="largest part of what the loss had gained that may be lost again, where updates "
            "or gradients leap with it",
            per_layer=False,
        ),
    )

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


_OTHER = 10.0


class InputShift(Rule):
    """A batch that stands out is none; a curriculum may change the scale a little."""

    name = "input_shift"
    follows = "surroundings:InputFollower"
    summary = "The inputs of the model do not become constant, nor change their scale for good."
    rank = 89
    role = "inputs"
    settings = (
        Factor(
            "max_input_shift",
            default=100.0,
            help="by how much the scale of the model's inputs may change for good, up or down",
            per_layer=False,
        ),
    )

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


class ModeSwitch(Rule):
    """Layers that are in evaluation mode from the start may be held there on purpose."""

    name = "mode_switch"
    follows = "surroundings:ModeFollower"
    summary = "A model that trains in training mode does not go on in evaluation mode."
    rank = 90
    settings = (
        Count(
            "max_steps_in_evaluation",
            default=20,
            help="how many watched steps in a row may be trained in evaluation mode after some in "
            "training mode",
            per_layer=False,
        ),
    )

    def assess(self, event: CourseEvent, course: Course, settings: Settings) -> Breach | None:
        """Return what is wrong with a switch to evaluation mode."""
        limit = settings["max_steps_in_evaluation"]
        if event.recovered or event.rows <= limit.value:
            return None
        if event.layer:
            whole = any(e.rule == self.name and not e.layer for e in course.events)
            if whole:
                return None
        return Breach(
            f"{named(event)} trains in evaluation mode since step {event.step}, over {event.rows} "
            f"watched steps; it was in training mode over {event.reference:.0f}",
            float(event.rows),
            limit,
            "warn" if event.layer else "fail",
            cause="a validation called eval(), and train() is not called after it: dropout is off, "
            "and batch norms use their running statistics, which no longer follow",
        )


class GrowingHooks(Rule):
    """Hooks that are removed again may be registered in each step."""

    name = "growing_hooks"
    follows = "surroundings:HookFollower"
    summary = "No layer gets more forward hooks in every step."
    rank = 91
    settings = (
        Count(
            "max_rising_steps",
            default=20,
            help="in how many watched steps in a row a layer may get more hooks",
        ),
    )

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


class StatisticsDrift(Rule):
    """A single batch that stands out is forgotten within some steps."""

    name = "statistics_drift"
    follows = "surroundings:BufferFollower"
    summary = "The running variance of a batch norm stays near that of its usual batches."
    rank = 92
    role = "buffers"
    settings = (
        Factor(
            "max_running_drift",
            default=100.0,
            help="largest running standard deviation by the usual one of a batch",
        ),
    )

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
