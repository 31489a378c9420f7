"""The optimizer goes down its own gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.training.contract.step_check import StepCheck

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation, Stepped
    from pytest_modelhealth.settings import Settings

_UP = 0.1
_OUTSIDE = 0.3


class UpdateDirection(StepCheck):
    """An update lies against the gradient that it is made from."""

    name = "update_direction"
    summary = "An optimizer descends the gradient that it steps on."
    rank = 67
    definition = (
        "The cosine between the first update of an optimizer and the gradient that it was made "
        "from exceeds 0.1, and the loss that is returned rises over the calls. Inconclusive where "
        "the optimizer is told to maximize. What moves weights beside optimizers has a cosine of "
        "more than 0.3 with the gradient."
    )
    source = "healthy optimizers have a negative cosine; weight decay and momentum alone stay below"

    def judge(
        self, stepped: Stepped, observation: Observation, settings: Settings
    ) -> Iterator[Finding]:
        """Yield the optimizers that climb."""
        if stepped.sign < 0 and stepped.slope is not None and stepped.slope.factor > 0.0:
            yield self.violation(
                place(observation),
                "the loss that the step returns cannot be positive, and is minimised: it falls "
                f"without bound (from {stepped.losses[0]:.4g} to {stepped.losses[-1]:.4g})",
                value=-1.0,
                cause="the minus of a negative log-likelihood, or of a similarity, is missing",
                independent=True,
            )
        losses = [loss for loss in stepped.losses if loss is not None]
        rises = len(losses) > 1 and losses[-1] > losses[0]
        climbs = max(stepped.climbs or 0.0, _OUTSIDE)
        if climbs > _OUTSIDE and stepped.optimizers:
            yield self.violation(
                place(observation),
                "beside the optimizer something moves the weights up their gradient (cosine "
                f"{climbs:.2f}), and does not take it back",
                value=climbs,
                cause="a perturbation, as of sharpness-aware training, that is not undone before "
                "the step",
                independent=True,
            )
        elif climbs > _OUTSIDE and rises:
            yield self.violation(
                place(observation),
                f"the step moves the weights up their gradient (cosine {climbs:.2f}), and "
                f"the loss rises from {losses[0]:.4g} to {losses[-1]:.4g}",
                value=climbs,
                cause="the update is added where it should be subtracted: alpha=-lr in p.add_",
                independent=True,
            )
        if not rises:
            return
        for optimizer in stepped.optimizers:
            if optimizer.direction is None or optimizer.direction <= _UP:
                continue
            what = (
                f"{optimizer.type_name} climbs its own gradient (cosine "
                f"{optimizer.direction:.2f}), and the loss rises from {losses[0]:.4g} to "
                f"{losses[-1]:.4g}"
            )
            if optimizer.maximizes and not stepped.is_loss:
                yield self.inconclusive(
                    place(observation),
                    f"{what}: it is told to maximize, which is right for a reward, and wrong for a "
                    "loss",
                )
                continue
            yield self.violation(
                place(observation),
                what,
                value=optimizer.direction,
                cause="a negative learning rate, or an update that is added where it should be "
                "subtracted",
                independent=True,
            )
