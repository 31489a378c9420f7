"""Rules for activations and gradients of layers in the course of a training."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.settings import Count, Factor, Ratio, Share
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
    from pytest_modelhealth.report import Course, CourseEvent
    from pytest_modelhealth.settings import Settings


_FEW = 3
_WORDS = {
    "inputs": "in the inputs of {layer}",
    "parameters": "in the parameter {name} of {layer}",
    "activations": "in the activations of {layer}",
    "gradients": "in the gradients of {layer}",
    "parameter_gradients": "in the gradient of the parameter {name} of {layer}",
    "loss": "in the loss",
}


class NonfiniteSteps(Rule):
    """NaN and infinity reach no weight, and stay in no step."""

    name = "nonfinite_steps"
    follows = "surroundings:NonfiniteFollower"
    summary = "In no step is there a NaN or infinity that the optimizer learns from."
    rank = 80
    definition = (
        "The first NaN or infinity of the loss, of activations, gradients or parameters, and the "
        "layer that made it. A step that no optimizer took, as under a gradient scaler, is no "
        "violation, unless max_skipped_steps follow each other. One that leaves loss and gradients "
        "finite, or that was over by the end, warns."
    )
    source = (
        "torch.amp.GradScaler skips a step whose gradients overflow and halves its scale, which "
        "starts at 65536: 16 steps in a row bring it to 1"
    )
    settings = (
        Count(
            "max_skipped_steps",
            default=20,
            help="how many steps in a row may be skipped since gradients are not finite",
            per_layer=False,
        ),
    )

    def assess(self, event: CourseEvent, course: Course, settings: Settings) -> Breach | None:
        """Return what is wrong with values that are no numbers."""
        where = _WORDS[event.role].format(name=repr(event.tensor), layer=named(event))
        before = event.facts.get("loss_before", float("nan"))
        after = event.facts.get("step_before", -1.0)
        details = (f"the loss before was {shown(before)}",) if known(before) else ()
        since = f"step {event.step}"
        if event.step - after > 1.0 and after >= 0.0:
            since = f"step {event.step} (step {after:.0f} was fine, those between unwatched)"
        if event.kind == "skipped":
            return self._skipped(event, settings, f"{since}, first {where}", details)
        if event.kind == "masked":
            return Breach(
                f"NaN or infinity {where} since {since}, which reaches neither loss nor gradients",
                float(event.rows),
                severity="warn",
                details=details,
            )
        text = f"NaN or infinity first appears {where} in {since}"
        if event.recovered:
            text += f"; it was gone after step {event.last}"
        return Breach(
            f"{text}; the loss before was {shown(before)}" if known(before) else text,
            float(event.rows),
            severity="warn" if event.recovered else "fail",
            cause=_CAUSES[event.role],
            details=details,
        )

    def _skipped(
        self, event: CourseEvent, settings: Settings, where: str, details: tuple[str, ...]
    ) -> Breach | None:
        limit = settings["max_skipped_steps"]
        length = event.last - event.step + 1
        if event.rows < _FEW or length < limit.value:
            return None
        return Breach(
            f"every optimizer step is skipped over {length} steps, as something is not finite: "
            f"since {where}",
            float(length),
            limit,
            severity="warn" if event.recovered else "fail",
            cause="it is not the scale that overflows: the loss or a layer makes NaN or infinity "
            "at any scale",
            details=details,
        )


_CAUSES = {
    "inputs": "the batch of this step holds values that are no numbers",
    "parameters": "the step before wrote them: its gradient or learning rate was not finite",
    "activations": "an operation of this layer overflows, or divides by zero",
    "gradients": "the backward pass divides by zero or overflows, as the derivative of sqrt at 0",
    "parameter_gradients": "the backward pass of this layer divides by zero or overflows",
    "loss": "the loss takes the logarithm of zero, divides by zero or overflows",
}


_HUGE = 1e4
_CERTAIN = 1e6
_GROWN = 100.0
_LARGE = 10.0


class ExplodingSignals(Rule):
    """A spike that passes is none; a branch that begins at zero may grow."""

    name = "exploding_signals"
    follows = "signals:ExplosionFollower"
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
        Factor(
            "max_gradient_rise",
            default=1000.0,
            help="largest growth of a layer's gradient norm over what was usual, for good",
        ),
        Factor(
            "max_activation_rise",
            default=1000.0,
            help="largest growth of a layer's activations over what was usual, for good",
        ),
    )

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


class DyingLayers(Rule):
    """A third of dead units is no fault; nearly all are."""

    name = "dying_layers"
    follows = "signals:DyingFollower"
    summary = "No layer loses nearly all its units, or the spread of its output."
    rank = 83
    definition = (
        "The part of a layer's units that is active in none of at least 16 values of a batch, the "
        "least of the latest steps, where it once was below one half; and the largest of the "
        "latest standard deviations of a layer's output relative to the geometric mean so far, "
        "where its input kept its spread. Both over ten watched steps and to the end."
    )
    source = (
        "10 to 30 % of dead ReLU units are common in healthy networks (CS231n notes); with 90 % "
        "a layer has lost its width"
    )
    settings = (
        Share(
            "max_dying_fraction",
            default=0.9,
            help="largest part of a layer's units that may die in the course of a training",
        ),
        Ratio(
            "min_spread_kept",
            default=1e-3,
            help="least of its usual standard deviation that a layer's output keeps",
        ),
    )

    def assess(self, event: CourseEvent, course: Course, settings: Settings) -> Breach | None:
        """Return what is wrong with a layer that dies."""
        if is_short(event):
            return None
        if event.kind == "units":
            limit = settings.limit("max_dying_fraction", event.layer)
            if event.value <= limit.value:
                return None
            return Breach(
                f"{event.value:.0%} of the units of {named(event)} are dead since step "
                f"{event.step}; they were {event.reference:.0%}",
                event.value,
                limit,
                cause="a step too large pushed its biases below all inputs, or its inputs shifted",
            )
        if any((e.kind, e.layer) == ("units", event.layer) for e in course.events):
            return None
        limit = settings.limit("min_spread_kept", event.layer)
        kept = event.value / event.reference if event.reference else 1.0
        if kept >= limit.value:
            return None
        return Breach(
            f"the output of {named(event)} became constant: its standard deviation fell to "
            f"{shown(kept)} of what was usual since step {event.step}, that of its input did not",
            kept,
            limit,
            sort_of(event, course),
            cause="it saturates, or its weights shrank to nothing",
        )


_PATIENT = 20
_MOST = 0.5


class FadingGradients(Rule):
    """Gradients that fade with the loss are those of a model that has learnt."""

    name = "fading_gradients"
    follows = "signals:FadingFollower"
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
        Ratio(
            "min_gradient_kept",
            default=1e-4,
            help="least of its usual size that a gradient keeps while the loss is not low",
        ),
        Count(
            "max_steps_without_gradient",
            default=30,
            help="how many watched steps in a row a layer that had a gradient may go without",
        ),
    )

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


_PART = 0.5


class SaturatingLayers(Rule):
    """An output that is certain of data it knows by heart is none; nor is a gate that closes."""

    name = "saturating_layers"
    follows = "signals:SaturationFollower"
    summary = "No softmax, sigmoid or tanh comes to give nothing but the ends of its range."
    rank = 93
    definition = (
        "How near the values of a bounded activation are to the ends of its range, from 0 to 1: "
        "the mean square of tanh; the mean of squares by the mean for softmax, 1 where each row "
        "has a single 1; and 1 - 4 E[s(1 - s)] for sigmoid. The least of the latest values, where "
        "it began below 0.7, over ten watched steps and to the end. More than max_saturating is a "
        "violation where the loss never is negative and still above half of its first level, and "
        "warns where it is above its floor."
    )
    source = "at its ends the slope is next to zero, and nothing before it learns any longer"
    settings = (
        Share(
            "max_saturating",
            default=0.995,
            help="how near a bounded activation may come to the ends of its range in a training",
        ),
    )

    def assess(self, event: CourseEvent, course: Course, settings: Settings) -> Breach | None:
        """Return what is wrong with an activation that saturates."""
        limit, loss = settings.limit("max_saturating", event.layer), course.loss
        if is_short(event) or event.value <= limit.value or loss.is_at_floor:
            return None
        is_stuck = loss.is_known and loss.never_negative and loss.recent > _PART * loss.first
        return Breach(
            f"{named(event)} saturates since step {event.step}: its values are at the ends of "
            f"their range to {event.value:.1%}, at first to {shown(100 * event.reference)}%",
            event.value,
            limit,
            "fail" if is_stuck else "warn",
            cause="its inputs grow without a bound: a softmax is one-hot, a sigmoid or tanh flat, "
            "and gradients vanish there",
        )
