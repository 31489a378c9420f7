"""A call does not step on gradients of the call before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.settings import Setting
from pytest_modelhealth.training.contract.step_check import StepCheck

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
        "adds to it or the optimizer steps again, two calls are made once more with each gradient "
        "cleared once it is stepped on: if a parameter ends elsewhere by more than max_left_over "
        "of what it moved, it is a violation. So is a second step on the very gradient of the "
        "first, one on no gradient or between a forward and its backward pass, and a closure that "
        "does not clear. An optimizer that steps on the loss of another one's part, too, is warned "
        "of."
    )
    source = "exact but for rounding; gradients added up on purpose have no step in between"
    settings = (
        Setting(
            "max_left_over",
            float,
            default=1e-3,
            minimum=0.0,
            help="largest effect of gradients that were stepped on and not cleared, on where two "
            "calls bring a parameter, by how far they move it",
            per_layer=False,
        ),
    )

    def judge(
        self, stepped: Stepped, observation: Observation, settings: Settings
    ) -> Iterator[Finding]:
        """Yield what is stepped on twice."""
        limit, found = settings["max_left_over"], stepped.left_over
        stale = next((o for o in stepped.optimizers if o.stale), None)
        piled, mixed = next((o for o in stepped.optimizers if o.piled), None), stepped.mixed
        again = next((o for o in stepped.optimizers if o.repeated), None)
        if stale is not None:
            yield self.violation(
                place(observation),
                f"{stale.type_name} steps before the backward pass of its call: on no gradient, or "
                "between a forward and its backward pass",
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
        elif piled is not None:
            yield self.violation(
                place(observation),
                f"each evaluation of the closure of {piled.type_name} adds to the gradient of the "
                "one before",
                value=1.0,
                cause="zero_grad() stands before optimizer.step(closure) and not in the closure",
                independent=True,
            )
        elif mixed:
            yield self.violation(
                place(observation),
                f"{mixed} steps on gradients of two losses, one of which trains the part that "
                "another optimizer holds: of the generator's, say, in the discriminator's step",
                value=1.0,
                cause="both losses go backward before either optimizer steps: clear or detach in "
                "between, unless both are meant for this part",
                severity="warn",
            )
        elif found is not None and found.effect > limit.value:
            yield self.violation(
                place(observation, found.layer),
                "gradients that the optimizer has stepped on are still there when it steps again: "
                f"cleared in between, two calls move parameters by {found.effect:.0%} less or more",
                value=found.effect,
                limit=limit,
                tensor=found.own,
                cause="zero_grad() is missing, is called between backward() and step() only, or "
                "for another optimizer or other parameters",
                independent=True,
            )
