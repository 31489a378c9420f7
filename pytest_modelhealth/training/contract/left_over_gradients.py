"""A call does not step on gradients of the call before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.settings import Setting
from pytest_modelhealth.training.contract.step_check import StepCheck, place

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation, Stepped
    from pytest_modelhealth.settings import Settings


class LeftOverGradients(StepCheck):
    """Gradients that an optimizer has stepped on are cleared before the next ones are added."""

    name = "left_over_gradients"
    summary = "No optimizer steps twice on the same gradient."
    rank = 63
    role = "parameter_gradients"
    definition = (
        "Where a gradient is still there after its optimizer stepped, when the next backward pass "
        "adds to it or the optimizer steps again, the second call is made once more with all "
        "gradients cleared before it: if the gradient at the step differs by more than "
        "max_left_over of its norm, it is a violation. So is a second step of an optimizer on the "
        "very gradient of its first, and one before the backward pass of its call."
    )
    source = "exact but for rounding; gradients added up on purpose have no step in between"
    settings = (
        Setting(
            "max_left_over",
            float,
            default=1e-3,
            minimum=0.0,
            help="largest part of a gradient at the optimizer's step that is left over from the "
            "call before, by its norm",
            per_layer=False,
        ),
    )

    def judge(
        self, stepped: Stepped, observation: Observation, settings: Settings
    ) -> Iterator[Finding]:
        """Yield what is stepped on twice."""
        limit, found = settings["max_left_over"], stepped.left_over
        stale = next((o for o in stepped.optimizers if o.stale), None)
        again = next((o for o in stepped.optimizers if o.repeated), None)
        if stale is not None:
            yield self.violation(
                place(observation),
                f"{stale.type_name} steps before the backward pass of its call: on no gradient, or "
                "on that of the call before",
                value=1.0,
                cause="the order of backward(), step() and zero_grad() is another one than this",
                independent=True,
            )
        elif again is not None:
            yield self.violation(
                place(observation),
                f"{again.type_name} steps twice in a call on the very same gradient",
                value=1.0,
                cause="optimizer.step() is called once more than backward(): by the loop and by a "
                "scaler or a wrapper, say",
                independent=True,
            )
        elif found is not None and found.effect > limit.value:
            yield self.violation(
                place(observation, found.layer),
                "gradients of the call before are still there when the next ones are added: they "
                f"make {found.effect:.0%} of the gradient that the optimizer steps on",
                value=found.effect,
                limit=limit,
                tensor=found.own,
                cause="zero_grad() is missing, is called between backward() and step() only, or "
                "for another optimizer or other parameters",
                independent=True,
            )
