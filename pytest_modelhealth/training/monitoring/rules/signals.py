"""Rules for activations and gradients of layers in the course of a training."""

from __future__ import annotations

from pytest_modelhealth.report import Course, CourseEvent
from pytest_modelhealth.settings import Severity
from pytest_modelhealth.training.monitoring.following import signals as following
from pytest_modelhealth.training.monitoring.rule import Kind, Rule, by_loss, rule

_HUGE = 1e4
"""Activations below are in range, whatever they began at."""
_CERTAIN = 1e6
_GROWN = 100.0
_LARGE = 10.0


def _exploded(event: CourseEvent, course: Course) -> Severity | None:
    if event.kind == "gradients":  # by six orders of magnitude: whatever the loss says
        is_certain = bool(event.reference) and event.value > _CERTAIN * event.reference
        return "fail" if is_certain else by_loss(event, course)
    if event.value >= _HUGE:
        return by_loss(event, course)
    return "warn" if course.loss.is_known and not course.loss.is_well else None


def _exponential(event: CourseEvent, course: Course) -> Severity | None:
    has_grown = bool(event.reference) and event.value > _GROWN * event.reference
    return "fail" if has_grown and event.value >= _LARGE else None


_ROSE = " of {layer} grew {change:.3g}-fold, from {reference:.3g} to {value:.3g}, "
_ROSE += "and stays there since step {step}"
_TOO_LARGE = "steps are too large for this layer, and nothing bounds what it makes"


def _is_flat_alone(event: CourseEvent, course: Course) -> Severity | None:
    """A layer whose units died has lost its spread by that."""
    is_dead = any((e.kind, e.layer) == ("units", event.layer) for e in course.events)
    return None if is_dead else by_loss(event, course)


_PATIENT = 20
_MOST = 0.5


def _stuck(event: CourseEvent, course: Course) -> Severity | None:
    return "fail" if course.loss.is_flat and not course.loss.is_at_floor else None


def _still_high(event: CourseEvent, course: Course) -> Severity | None:
    return None if course.loss.is_well else by_loss(event, course)


def _cut_for_long(event: CourseEvent, course: Course) -> Severity | None:
    """An expert may idle; a layer that is called and has no gradient for long is cut."""
    is_long = event.rows >= _MOST * course.steps and event.facts["is_called"] > 0.0
    return "fail" if is_long else "warn"


_NO_GRADIENT = " since step {step}, over {rows} watched steps, while others have theirs"
_DEAD_END = "what it makes is dead behind it, or no longer reaches the loss"


_PART = 0.5


def _saturated(event: CourseEvent, course: Course) -> Severity | None:
    """A model that knows its data by heart is certain; one that is stuck should not be."""
    loss = course.loss
    if loss.is_at_floor:
        return None
    is_stuck = loss.is_known and loss.never_negative and loss.recent > _PART * loss.first
    return "fail" if is_stuck else "warn"


RULES: dict[str, Rule] = {}

# A spike that passes is none; a branch that begins at zero may grow.
RULES["exploding_signals"] = rule(
    following.exploding_signals,
    Kind(
        "gradients",
        f"the gradient norm{_ROSE}",
        _TOO_LARGE,
        "change",
        "max_gradient_rise",
        grade=_exploded,
    ),
    Kind(
        "activations",
        f"the activations (rms){_ROSE}",
        _TOO_LARGE,
        "change",
        "max_activation_rise",
        grade=_exploded,
    ),
    Kind(
        "growth",
        "the activations (rms) of {layer} grow exponentially: {change:.3g}-fold so far, from "
        "{reference:.3g} to {value:.3g}, and {lately:.3g}-fold in the last two fifths of the "
        "training",
        "a gain, a scale or a reward of size is multiplied or rewarded without a bound",
        "change",
        grade=_exponential,
    ),
)

# A third of dead units is no fault; nearly all are.
RULES["dying_layers"] = rule(
    following.dying_layers,
    Kind(
        "units",
        "{value:.0%} of the units of {layer} are dead since step {step}; they were {reference:.0%}",
        "a step too large pushed its biases below all inputs, or its inputs shifted",
        limit="max_dying_fraction",
    ),
    Kind(
        "spread",
        "the output of {layer} became constant: its standard deviation fell to {change:.3g} of "
        "what was usual since step {step}, that of its input did not",
        "it saturates, or its weights shrank to nothing",
        "change",
        "min_spread_kept",
        below=True,
        grade=_is_flat_alone,
    ),
)

# Gradients that fade with the loss are those of a model that has learnt.
RULES["fading_gradients"] = rule(
    following.fading_gradients,
    Kind(
        "share",
        "the gradients of {layer} fell to {change:.3g} of their usual share of all since step "
        "{step}",
        "a layer behind it saturates, or its outputs no longer matter",
        "change",
        "min_gradient_kept",
        below=True,
        patience=_PATIENT,
        grade=by_loss,
    ),
    Kind(
        "all",
        "all gradients fell to {change:.3g} of what was usual since step {step}, while the "
        "loss is {loss.recent:.3g}, its best {loss.best:.3g}",
        "what the loss is made of saturates: it no longer tells how to improve",
        "change",
        "min_gradient_kept",
        below=True,
        patience=_PATIENT,
        grade=_still_high,
    ),
    Kind(
        "all_zero",
        "every gradient is exactly zero since step {step}, while the loss is {loss.recent:.3g}",
        "all units are dead or saturated, or the loss is clamped",
        patience=_PATIENT,
        grade=_still_high,
    ),
    Kind(
        "never",
        "the gradients of {layer} are {change:.3g} of the largest by their weights, since step "
        "{step}, and the loss stays where it was",
        "what lies behind this layer hardly passes gradients: it saturates",
        "change",
        "min_gradient_kept",
        below=True,
        scale=0.01,
        patience=_PATIENT,
        grade=_stuck,
    ),
    Kind(
        "zero",
        "the gradients of {layer} are exactly zero" + _NO_GRADIENT,
        _DEAD_END,
        "rows",
        "max_steps_without_gradient",
        grade=by_loss,
    ),
    Kind(
        "missing",
        "the gradients of {layer} are missing" + _NO_GRADIENT,
        _DEAD_END,
        "rows",
        "max_steps_without_gradient",
        grade=_cut_for_long,
    ),
)

# An output that is certain of data it knows by heart is none; nor is a gate that closes.
RULES["saturating_layers"] = rule(
    following.saturating_layers,
    Kind(
        "ends",
        "{layer} saturates since step {step}: its values are at the ends of their range to "
        "{value:.1%}, at first to {reference:.1%}",
        "its inputs grow without a bound: a softmax is one-hot, and gradients vanish",
        limit="max_saturating",
        grade=_saturated,
    ),
)
