"""Rules for weights and updates in the course of a training."""

from __future__ import annotations

from functools import partial

from pytest_modelhealth.report import Course, CourseEvent
from pytest_modelhealth.settings import Severity
from pytest_modelhealth.training.monitoring.following import weights as following
from pytest_modelhealth.training.monitoring.rule import Kind, Rule, by_loss, rule

_PATIENT = 20
_HIGH = 1e-2
_LONG = 100


def _high_for_nothing(event: CourseEvent, course: Course) -> Severity | None:
    return "warn" if event.value > _HIGH and course.loss.is_flat else None


_CHANGES = (
    "each step changes the weights of {layer} by {value:.3g} of their norm, since step {step}"
)
_RATE = "the learning rate is too large for these weights"


_CERTAIN = 1000.0


def _drifted(event: CourseEvent, course: Course) -> Severity | None:
    """By a factor of a thousand it fails, whatever the loss says."""
    small, large = sorted((event.value, event.reference))
    return "fail" if large > _CERTAIN * small else by_loss(event, course)


_SIZES = "from {reference:.3g} to {value:.3g} (rms); it passed a tenth of that in step {step}"


_MOST = 0.5


def _left_out_for_long(event: CourseEvent, course: Course) -> Severity | None:
    return "fail" if event.rows >= _MOST * course.steps else "warn"


_RESTS = "{layer} is no longer updated since step {step}, over {rows} watched steps, while others "


_still = partial(Kind, measure="rows", limit="max_still_steps")


_STANDSTILL_LONG = 5
_STANDSTILL_MOST = 0.4
_NO_RATE = 1e-7
_NOISY = 0.3
_OFTEN = 4


def _longer_than_pauses(event: CourseEvent, course: Course) -> Severity | None:
    return "fail" if event.rows > _OFTEN * event.reference else None


def _stops(event: CourseEvent, course: Course) -> Severity | None:
    is_most = event.rows >= _STANDSTILL_MOST * course.steps
    return _longer_than_pauses(event, course) if is_most else None


def _stops_at_no_rate(event: CourseEvent, course: Course) -> Severity | None:
    return _stops(event, course) if event.facts["rate"] < _NO_RATE else None


def _rarely(event: CourseEvent, course: Course) -> Severity | None:
    return "warn" if event.rows >= course.steps / 4 else None


def _learns_nothing(event: CourseEvent, course: Course) -> Severity | None:
    """Adversarial losses stand still in healthy trainings, and noise hides what is learnt."""
    loss = course.loss
    is_clear = loss.never_negative and loss.noise < _NOISY * abs(loss.first)
    return "warn" if is_clear and course.most_optimizer_steps <= 1 else None


_NO_CHANGE = "no parameter changed any longer since step {step}, over {rows} watched steps, though "
_NO_CHANGE += "gradients came; the loss is {loss.recent:.3g}"


_standing = partial(Kind, measure="rows", limit="max_steps_standing")


RULES: dict[str, Rule] = {}

# Weights that begin at zero may grow at first.
RULES["update_ratio"] = rule(
    following.update_ratio,
    Kind("large", _CHANGES, _RATE, limit="max_update_ratio", patience=_PATIENT, grade=by_loss),
    Kind(
        "large",
        _CHANGES + ", and the loss is where it began",
        _RATE,
        patience=_LONG,
        grade=_high_for_nothing,
    ),
)

# What begins at zero may grow to the size of others.
RULES["weight_drift"] = rule(
    following.weight_drift,
    Kind(
        "growth",
        "the parameters of {layer} grew {change:.3g}-fold, " + _SIZES,
        "steps are too large, and nothing bounds these weights",
        "change",
        "max_weight_growth",
        grade=_drifted,
    ),
    Kind(
        "shrinking",
        "the parameters of {layer} shrank to {change:.3g}, " + _SIZES,
        "weight decay outweighs what the loss asks for",
        "change",
        "min_weight_kept",
        below=True,
        grade=_drifted,
    ),
)

# Frozen layers, and those whose rate a schedule brings to zero, may stand still.
RULES["stopped_updates"] = rule(
    following.stopped_updates,
    _still(
        "frozen",
        _RESTS + "are: its parameters no longer have requires_grad",
        "it was frozen in the middle of the training: waive it if that is meant",
        grade="warn",
    ),
    _still(
        "rate_zero",
        _RESTS + "are: its learning rate is zero",
        "its schedule or its group's factor falls to zero: waive it if that is meant",
        grade="warn",
    ),
    _still(
        "left_out",
        "no optimizer steps {layer} any longer since step {step}, over {rows} watched steps, "
        "though it requires gradients and has them",
        "it was left out when the optimizer was made anew; what is to rest is frozen by "
        "requires_grad_(False)",
        grade=_left_out_for_long,
    ),
    _still(
        "zero",
        "the parameters of {layer} stand still since step {step}, over {rows} watched steps, "
        "though it has gradients and other layers move",
        "updates are too small for its dtype, or the optimizer holds other tensors",
    ),
)

# Something is learnt, or there is nothing to learn.
RULES["standstill"] = rule(
    following.standstill,
    _standing(
        "weights",
        "no parameter changed in {rows} watched steps, though gradients came",
        "the optimizer holds other tensors, never steps, or its learning rate is 0",
    ),
    _standing(
        "gradients",
        "no gradient came to any parameter in {rows} watched steps",
        "the loss is not computed from the output, or backward() is missing",
    ),
    _standing(
        "stopped",
        _NO_CHANGE,
        "the learning rate is next to 0: its schedule ended, or counts other steps",
        grade=_stops_at_no_rate,
    ),
    _standing(
        "stopped",
        _NO_CHANGE,
        "the learning rate is too small for the weights' dtype, or the optimizer rests",
        grade=_stops,
    ),
    _standing(
        "rare",
        "an optimizer hardly steps any longer since step {step}: in {value:.0%} of the latest "
        "watched steps, in {reference:.0%} of the first, though gradients came",
        "the loop skips updates: a condition on the loss, a scaler, or a count of batches",
        grade=_rarely,
    ),
    _standing(
        "idle",
        "no optimizer took a step since step {step}, over {rows} watched steps, though "
        "gradients came",
        "a scaler skips every step, as gradients are not finite, or step() is not called",
        grade=_longer_than_pauses,
    ),
    _standing(
        "loss",
        "the loss is where it began after {rows} watched steps: {loss.recent:.3g}",
        "updates are too small or too large, the targets do not belong to the inputs, or the "
        "output does not depend on them",
        scale=_STANDSTILL_LONG,
        grade=_learns_nothing,
    ),
    unless="is_at_floor",
    unseen="no forward pass was seen in {} watched steps: the loop must train this very object, "
    "with gradients on, before step_end()",
)

# Bounds that are put on weights in each step belong to a training, and are none.
RULES["outside_changes"] = rule(
    following.outside_changes,
    Kind(
        "outside",
        "the weights of {layer} were replaced or overwritten before step {last}: their norm "
        "jumped from {reference:.3g} to {value:.3g}, the update was {update:.3g}",
        "they were initialised anew, loaded, averaged or scaled by something else",
        "jump",
        patience=1,
        grade="warn",
    ),
)
