"""Rules for the loss, NaN, modes, hooks, inputs and running statistics of a training."""

from __future__ import annotations

from pytest_modelhealth.report import Course, CourseEvent, Violation
from pytest_modelhealth.settings import Settings, Severity
from pytest_modelhealth.training.monitoring.following import surroundings as following
from pytest_modelhealth.training.monitoring.rule import PATIENCE, Kind, Rule, breach, named, rule

_FEW = 3
_NONFINITE = {
    "inputs": (
        "in the inputs of {layer}",
        "the batch of this step holds values that are no numbers",
    ),
    "parameters": (
        "in the parameter {tensor!r} of {layer}",
        "the step before wrote them: its gradient or learning rate was not finite",
    ),
    "activations": (
        "in the activations of {layer}",
        "an operation of this layer overflows, or divides by zero",
    ),
    "gradients": (
        "in the gradients of {layer}",
        "the backward pass divides by zero or overflows, as the derivative of sqrt at 0",
    ),
    "parameter_gradients": (
        "in the gradient of the parameter {tensor!r} of {layer}",
        "the backward pass of this layer divides by zero or overflows",
    ),
    "loss": (
        "in the loss",
        "the loss takes the logarithm of zero, divides by zero or overflows",
    ),
}
"""Where it is, and the likely cause, by the role of the tensor."""


def _nonfinite(event: CourseEvent, course: Course, settings: Settings) -> Violation | None:
    """Return what is wrong with values that are no numbers."""
    where, cause = _NONFINITE[event.role]
    where = where.format(tensor=event.tensor, layer=named(event))
    loss, after = event.facts.get("loss_before", 0.0), event.facts.get("step_before", -1.0)
    before = f"the loss before was {loss:.3g}" if loss == loss else ""  # NaN: none was seen
    since = f"step {event.step}"
    if event.step - after > 1.0 and after >= 0.0:
        since += f" (step {after:.0f} was fine, those between unwatched)"
    limit, value = None, float(event.rows)
    severity: Severity = "warn" if event.recovered else "fail"
    if event.kind == "skipped":
        limit, value = settings["max_skipped_steps"], float(event.last - event.step + 1)
        if event.rows < _FEW or value < limit.value:
            return None
        text = (
            f"every optimizer step is skipped over {value:.0f} steps, as something is not "
            f"finite: since {since}, first {where}"
        )
        cause = "it is not the scale that overflows: the loss or a layer makes NaN or infinity "
        cause += "at any scale"
    elif event.kind == "masked":
        text = f"NaN or infinity {where} since {since}, which reaches neither loss nor gradients"
        cause, severity = "", "warn"
    else:
        text = f"NaN or infinity first appears {where} in {since}"
        text += f"; it was gone after step {event.last}" if event.recovered else ""
        text += f"; {before}" if before else ""
    return breach(event, text, value, limit, severity, cause, (before,) if before else ())


_LARGE = 0.03
_LEAPS = 5.0
_SOME = 5e-3
_DOUBLE = 2.0
_WIDE = 10.0
_STEEP = 30.0
_LOST, _WORSE = 50.0, 5.0
_PATIENT = 2 * PATIENCE


def _diverged(event: CourseEvent, course: Course, settings: Settings) -> Violation | None:
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
        f"the loss rose from {event.reference:.3g}, its best at step {facts['best_step']:.0f}, "
        f"to {event.value:.3g}, and stayed there since step {event.step}"
    )
    if risen > limit.value:
        return breach(event, text, risen, limit, cause=_cause(event))
    gain = gained if gained > 0.3 * max(start, _WIDE * facts["noise"]) else scale
    lost, least = rise / gain, settings["max_lost_progress"]
    if lost < least.value or rise < _WIDE * facts["noise"]:
        return None
    if _is_unstable(event):
        return breach(event, text, lost, least, cause=_cause(event))
    if event.rows < _PATIENT or course.most_optimizer_steps > 1:
        return None
    is_far = event.value > max(_LOST * event.reference, _WORSE * abs(facts["first"]))
    if loss.never_negative and is_far:
        return breach(event, text, lost, least, cause="steps are too large, and add up")
    why = "the model diverged, or what it learns changed: its data, its targets, its rewards"
    return breach(event, text, lost, least, severity="warn", cause=why)


def _is_unstable(event: CourseEvent) -> bool:
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


def _of_another_size(event: CourseEvent, course: Course) -> Severity | None:
    small, large = sorted((event.value, event.reference))
    return "warn" if large >= _OTHER * small else None


_JUMPED = "the standard deviation of the model's inputs jumped from {reference:.3g} to "
_JUMPED += "{value:.3g} since step {step}, and stays there"
_OTHER_INPUTS = (
    _JUMPED,
    "the loader no longer standardises its samples, or gives other ones",
    "factor",
)


def _switched(event: CourseEvent, course: Course) -> Severity | None:
    """Single layers, as batch norms, may be frozen late; nothing more where the whole model is."""
    is_whole = any((e.rule, e.layer) == (event.rule, "") for e in course.events)
    return "fail" if not event.layer else None if is_whole else "warn"


RULES: dict[str, Rule] = {}

# NaN and infinity reach no weight, and stay in no step.
RULES["nonfinite_steps"] = Rule(following.nonfinite_steps, _nonfinite)

# What was learnt is not lost again.
RULES["loss_divergence"] = Rule(following.loss_divergence, _diverged)

# A batch that stands out is none; a curriculum may change the scale a little.
RULES["input_shift"] = rule(
    following.input_shift,
    Kind(
        "constant",
        "all inputs of the model are the same number since step {step}: their standard "
        "deviation is {value:.3g}, it was {reference:.3g}",
        "the loader gives blank or constant samples: nothing can be learnt of them",
    ),
    Kind("scale", *_OTHER_INPUTS, "max_input_shift"),
    Kind("scale", *_OTHER_INPUTS, grade=_of_another_size),
)

# Layers that are in evaluation mode from the start may be held there on purpose.
RULES["mode_switch"] = rule(
    following.mode_switch,
    Kind(
        "switched",
        "{layer} trains in evaluation mode since step {step}, over {rows} watched steps; it "
        "was in training mode over {reference:.0f}",
        "a validation called eval(), and train() is not called after it: dropout is off",
        "rows",
        "max_steps_in_evaluation",
        grade=_switched,
    ),
)

# Hooks that are removed again may be registered in each step.
RULES["growing_hooks"] = rule(
    following.growing_hooks,
    Kind(
        "rising",
        "{layer} gets more forward hooks in every step since step {step}: it has {value:.0f} now",
        "a hook is registered in the training loop and not removed",
        "rows",
        "max_rising_steps",
    ),
)

# A single batch that stands out is forgotten within some steps.
RULES["statistics_drift"] = rule(
    following.statistics_drift,
    Kind(
        "far",
        "the running statistics of {layer} are far from its usual batches since step {step}: "
        "the running standard deviation is {value:.3g}, that of a usual input {reference:.3g}",
        "some batches are on another scale and dominate the average",
        "change",
        "max_running_drift",
    ),
)
