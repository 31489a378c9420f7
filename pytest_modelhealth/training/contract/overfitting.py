"""A model can learn one batch by heart."""

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

_ENOUGH = 0.5


class Overfitting(StepCheck):
    """The step lowers the loss of one batch, called again and again."""

    name = "overfitting"
    summary = "Called again and again on one batch, a step lowers its loss."
    rank = 75
    minimum_evidence = "run_step(..., overfit=120)"
    role = "activations"
    definition = (
        "The least loss of N calls on the one batch, by the first: a fall of less than "
        "min_loss_fall is a violation, of less than half inconclusive. Only on request."
    )
    source = (
        "after 120 steps of Adam(3e-3) 2 of 219 healthy models have not lowered their loss by 2 %, "
        "14 not by half"
    )
    settings = (
        Setting(
            "min_loss_fall",
            float,
            default=0.02,
            minimum=0.0,
            maximum=1.0,
            help="least fall of the loss when a step is called on one batch again and again, by "
            "the first loss",
            per_layer=False,
        ),
    )

    def judge(
        self, stepped: Stepped, observation: Observation, settings: Settings
    ) -> Iterator[Finding]:
        """Yield that it does not fall, or too little to tell."""
        if stepped.overfit is None:
            return
        limit = settings["min_loss_fall"]
        first, best, call = stepped.overfit
        fall = (first - best) / abs(first) if first else 0.0
        what = (
            f"on one batch the loss falls from {first:.4g} to {best:.4g} at best (call {call}), by "
            f"{fall:.1%}"
        )
        if not fall >= limit.value:
            yield self.violation(
                place(observation),
                what,
                value=fall,
                limit=limit,
                cause="the model cannot tell the samples apart, the target has nothing to do with "
                "them, or the rate is far off",
                independent=True,
            )
        elif fall < _ENOUGH:
            yield self.inconclusive(
                place(observation), f"{what}; give it more calls, or a larger rate"
            )
