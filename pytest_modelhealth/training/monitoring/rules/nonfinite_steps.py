"""No value of a training stops being a number."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.settings import Setting
from pytest_modelhealth.training.monitoring.rules.rule import Breach, Rule, known, named, shown

if TYPE_CHECKING:
    from pytest_modelhealth.report import Course, CourseEvent
    from pytest_modelhealth.settings import Settings
    from pytest_modelhealth.training.monitoring.following.follower import Follower

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
        Setting(
            "max_skipped_steps",
            int,
            default=20,
            minimum=1,
            help="how many steps in a row may be skipped since gradients are not finite",
            per_layer=False,
        ),
    )

    def follower(self) -> Follower:
        """Return what sees the steps."""
        from pytest_modelhealth.training.monitoring.following.nonfinite import NonfiniteFollower

        return NonfiniteFollower(self.name)

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
