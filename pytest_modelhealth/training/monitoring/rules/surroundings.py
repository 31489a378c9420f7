"""Rules for the loss, NaN, modes, hooks, inputs and running statistics of a training."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from pytest_modelhealth.report import Course, CourseEvent, Finding
from pytest_modelhealth.settings import Settings, Severity
from pytest_modelhealth.training.monitoring.course import Follower, Table
from pytest_modelhealth.training.monitoring.levels import Levels
from pytest_modelhealth.training.monitoring.row import WORDS, StepRow
from pytest_modelhealth.training.monitoring.rule import PATIENCE, Kind, breach, label, rule

_CAUSES = {
    "inputs": "the batch of this step holds values that are no numbers",
    "parameters": "the step before wrote them: its gradient or learning rate was not finite",
    "activations": "an operation of this layer overflows, or divides by zero",
    "gradients": "the backward pass divides by zero or overflows, as the derivative of sqrt at 0",
    "parameter_gradients": "the backward pass of this layer divides by zero or overflows",
    "loss": "the loss takes the logarithm of zero, divides by zero or overflows",
}
"""What it is likely to come from, by the role of the first tensor."""


def _nonfinite(event: CourseEvent, course: Course, settings: Settings) -> Finding | None:
    """Return what is wrong with values that are no numbers."""
    where, cause = "in the loss", _CAUSES[event.role]
    if event.role != "loss":
        where = f"in {WORDS[event.role].format(name=event.tensor)} of {label(event)}"
    is_masked = event.kind == "masked"
    severity: Severity = "warn" if event.recovered or is_masked else "fail"
    value, limit, loss = float(event.rows), None, event.facts["loss_before"]
    text = f"NaN or infinity first appears {where} in step {event.step}"
    text += f"; it was gone after step {event.last}" if event.recovered else ""
    text += "" if math.isnan(loss) else f"; the loss before was {loss:.3g}"
    if is_masked:
        text += "; it reaches neither loss nor gradients"
    elif event.kind == "skipped":
        limit, value = settings["max_skipped_steps"], float(event.last - event.step + 1)
        if event.rows < 3 or value < limit.value:
            return None
        text = f"every optimizer step is skipped over {value:.0f} steps, as something is not "
        text += f"finite: since step {event.step}, first {where}"
        cause = "the loss or a layer makes NaN or infinity at any scale"
    return breach(event, text, value, limit=limit, severity=severity, cause=cause)


@rule(assess=_nonfinite)
def nonfinite_steps(table: Table, follower: Follower) -> Iterator[None]:
    """NaN and infinity reach no weight, and stay in no step."""
    loss_before = math.nan
    while True:
        row = table.row
        kind, origin, loss = _kind(row), row.origin, row.loss
        for other, layer in list(follower.open):
            if other != kind and (other, kind) != ("poisoned", "skipped"):
                follower.mark(other, False, math.nan, math.nan, layer=layer)
        layers = [layer for own, layer in follower.open if own == kind]
        if layers:
            follower.mark(kind, True, math.nan, loss_before, layer=layers[0])
        elif kind:
            follower.mark(
                kind,
                True,
                math.nan if loss is None else loss,
                loss_before,
                layer="" if origin is None else origin.layer,
                role="loss" if origin is None else origin.role,
                tensor="" if origin is None else origin.tensor,
                facts={"loss_before": loss_before},
            )
        if loss is not None and math.isfinite(loss):
            loss_before = loss
        yield


def _kind(row: StepRow) -> str:
    """Return what kind of step it is; ``""`` if all are numbers."""
    bad_loss = row.loss is not None and not math.isfinite(row.loss)
    if row.origin is None and not bad_loss and not math.isinf(row.gradient_norm):
        return ""
    if bool((row.values["parameter_nonfinite"] > 0).any()):
        return "poisoned"
    bad_gradients = not math.isfinite(row.gradient_norm) and bool(
        (row.values["parameter_gradient_nonfinite"] > 0).any()
    )
    if not bad_loss and not bad_gradients and row.origin is not None:
        is_forward = row.origin.role in ("inputs", "activations")
        return "masked" if is_forward else "skipped"
    return "poisoned" if row.optimizer_steps else "skipped"


_LARGE = 0.1
_STEEP = 30.0
_WIDE = 10.0
_BOTTOM = 1000.0


def _diverged(event: CourseEvent, course: Course, settings: Settings) -> Finding | None:
    """Return what is wrong with a loss that is above its best."""
    if event.recovered or event.rows < PATIENCE:
        return None
    if event.kind == "bottom":
        text = f"the loss falls without bound: from {event.reference:.3g} to {event.value:.3g}"
        cause = "a term is maximised that has no bound: a sign, as of a divergence, is wrong"
        return breach(event, text, event.value, cause=cause)
    facts, loss, rise = event.facts, course.loss, event.value - event.reference
    first, ratio, steepness = facts["first"], facts["update_ratio"], facts["gradient_growth"]
    start = abs(first) if loss.never_negative else 0.0
    gained, noise = first - event.reference, _WIDE * facts["noise"]
    scale = max(gained, start, noise, 1e-12)
    value, limit = rise / scale, settings["max_loss_rise"]
    # updates or gradients are out of all proportion while the loss is high
    is_certain = value > limit.value or ratio > _LARGE or steepness > _STEEP
    if value <= limit.value:
        value = rise / (gained if gained > 0.3 * max(start, noise) else scale)
        limit = settings["max_lost_progress"]
        is_brief = event.rows < 2 * PATIENCE or course.most_optimizer_steps > 1
        if value < limit.value or rise < noise or (is_brief and not is_certain):
            return None
    is_far = loss.never_negative and event.value > max(50.0 * event.reference, 5.0 * abs(first))
    text = (
        f"the loss rose from {event.reference:.3g}, its best at step {facts['best_step']:.0f}, "
        f"to {event.value:.3g}, and stayed there since step {event.step}"
    )
    cause = "the model diverged, or what it learns changed: its data, its targets, its rewards"
    if steepness > _STEEP:
        cause = f"gradients grew {steepness:.3g}-fold with it: the step is too large"
    elif is_certain or is_far:
        cause = f"steps are too large: updates of up to {ratio:.2g} of the weights go with it"
    severity: Severity = "fail" if is_certain or is_far else "warn"
    return breach(event, text, value, limit=limit, severity=severity, cause=cause)


@rule(assess=_diverged)
def loss_divergence(table: Table, follower: Follower) -> Iterator[None]:
    """What was learnt is not lost again; a loss above its best by no more than its noise is not."""
    levels = Levels()  # of updates, and of gradients
    noise, best_step, above_since = math.inf, -1, -1
    nothing = {"update_ratio": 0.0, "gradient_growth": 0.0}
    most = nothing
    while True:
        row, loss, is_on = table.row, table.loss.summary, bool(follower.open)
        levels.add(np.array([row.update_ratio, row.gradient_norm]), is_on)
        if not loss.is_known or row.loss is None:
            yield
            continue
        is_bottomless = loss.recent < -_BOTTOM * max(abs(loss.first), 1.0)
        follower.mark("bottom", is_bottomless, loss.recent, loss.first)
        if not is_on and (loss.best_step != best_step or noise > loss.noise):
            best_step, noise = loss.best_step, loss.noise
        floor = max(6.0 * noise, 0.5 * loss.progress, 0.05 * abs(loss.first))
        if row.loss - loss.best <= floor:
            above_since = -1
        elif above_since < 0:
            above_since = row.step
        is_above = not loss.lost <= floor
        if is_above:
            latest = {
                "update_ratio": np.exp(levels.low[0]),
                "gradient_growth": np.exp(levels.low - levels.reference)[1],
            }
            # the largest of each; NaN, of few values, is none
            most = {name: max(most[name], latest[name]) for name in most}
        else:
            most = nothing
        follower.mark(
            "loss",
            is_above,
            loss.recent,
            loss.best,
            since=above_since if above_since >= 0 else None,
            facts={**most, "first": loss.first, "noise": noise, "best_step": loss.best_step},
        )
        yield


@rule(
    Kind(
        "constant",
        "all inputs of the model are the same number since step {step}",
        "the loader gives blank or constant samples: nothing can be learnt of them",
    ),
    Kind(
        "scale",
        "the inputs' standard deviation is {value:.3g} since step {step}, it was {reference:.3g}",
        "the loader no longer standardises its samples, or gives other ones",
        "factor",
        "max_input_shift",
    ),
)
def input_shift(table: Table, follower: Follower) -> Iterator[None]:
    """A batch that stands out is none; a curriculum may change the scale a little."""
    spread = Levels()
    is_shifted: Any = False
    while True:
        std = table.row["", "input_std"] if "" in table.row.layers else math.nan
        if not math.isnan(std):
            spread.add(std, is_shifted)
            usual = np.exp(spread.usual)
            is_constant = spread.count >= 15 and std < 1e-6 * usual
            follower.mark("constant", is_constant, std, usual)
            if not is_constant:
                is_up = spread.low - spread.usual > math.log(10.0)
                is_shifted = (is_up and spread.count > 15) or spread.fell(10.0)
                value = np.exp(spread.low if is_up else spread.high)
                follower.mark("scale", is_shifted, value, usual)
        yield


def _switched(event: CourseEvent, course: Course) -> Severity | None:
    """Single layers, as batch norms, may be frozen late; nothing more where the whole model is."""
    is_whole = any((e.rule, e.layer) == (event.rule, "") for e in course.events)
    return "fail" if not event.layer else None if is_whole else "warn"


@rule(
    Kind(
        "switched",
        "{layer} trains in evaluation mode since step {step}, over {rows} watched steps",
        "a validation called eval(), and train() is not called after it: dropout is off",
        "rows",
        "max_steps_in_evaluation",
        grade=_switched,
    ),
    Kind(
        "never",
        "the model trains in evaluation mode from the start, over {rows} watched steps: its "
        "dropout is off, and its batch norms stand still",
        "train() is missing: from_pretrained and a validation leave a model in evaluation mode",
        "rows",
        "max_steps_in_evaluation",
        grade="warn",
    ),
)
def mode_switch(table: Table, follower: Follower) -> Iterator[None]:
    """Layers that are in evaluation mode from the start may be held there on purpose."""
    trained: Any = 0.0
    while True:
        modes = table["training_mode"]
        trained = trained + (modes == 1.0)
        active = (modes == 0.0) & (trained >= 5)
        follower.mark("switched", active, modes, trained, valid=~np.isnan(modes))
        # all of it: a part may be held there on purpose
        is_whole = "" in table.layers and modes[table.layers.index("")] == 0.0
        is_never = bool(is_whole) and not np.count_nonzero(trained)
        follower.mark("never", is_never, 0.0, 0.0)
        yield


@rule(
    Kind(
        "rising",
        "{layer} gets more forward hooks in every step since step {step}: it has {value:.0f} now",
        "a hook is registered in the training loop and not removed",
        "rows",
        "max_rising_steps",
    ),
)
def growing_hooks(table: Table, follower: Follower) -> Iterator[None]:
    """Hooks that are removed again may be registered in each step."""
    before: Any = np.nan
    rises: Any = 0.0
    while True:
        hooks = table["hooks"]
        valid = ~np.isnan(hooks)
        rises = np.where(hooks > before, rises + 1.0, rises * ~valid)
        follower.mark("rising", rises >= 10, hooks, before, valid=valid)
        before = np.where(valid, hooks, before)
        yield


@rule(
    Kind(
        "far",
        "the running standard deviation of {layer} is {value:.3g} since step {step}, that of its "
        "usual input {reference:.3g}",
        "some batches are on another scale and dominate the average",
        "change",
        "max_running_drift",
    ),
)
def statistics_drift(table: Table, follower: Follower) -> Iterator[None]:
    """A single batch that stands out is forgotten within some steps."""
    running, inputs = Levels(), Levels()
    while True:
        in_training, values = table["training_mode"] == 1.0, table["running_std"]
        if np.isnan(values).all():
            yield
            continue
        running.add(np.where(in_training, values, np.nan))
        inputs.add(table["input_std"])
        value, usual = np.exp(running.low), np.exp(inputs.usual)
        valid = running.valid & (running.count > 20)
        follower.mark("far", valid & (value > 10.0 * usual), value, usual, valid=valid)
        yield
