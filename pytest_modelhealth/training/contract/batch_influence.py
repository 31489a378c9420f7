"""Every half of the batch has an influence on the gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.checks.facts import place
from pytest_modelhealth.training.contract.step_check import StepCheck

if TYPE_CHECKING:
    from pytest_modelhealth.report import HalfInfluence, Observation, Stepped
    from pytest_modelhealth.settings import Settings


class BatchInfluence(StepCheck):
    """No half of the batch is dropped on the way to the optimizer."""

    name = "batch_influence"
    summary = "Each half of the batch changes the gradient that the optimizer steps on."
    rank = 64
    role = "inputs"
    definition = (
        "The samples of one half are replaced by those of the other, in all tensors of the batch: "
        "a violation if neither a gradient nor, after all calls, a parameter changes, bit for "
        "bit. Not so if the same samples get no gradient at the model's output wherever they "
        "stand, as masked labels do. Warned of where the model was given these samples, and only "
        "no gradient came back to them: a part of the loss may be switched off for now."
    )
    source = "exact: the gradient is looked at, as the first update of Adam is but its sign"

    def judge(
        self, stepped: Stepped, observation: Observation, settings: Settings
    ) -> Iterator[Finding]:
        """Yield the half that is dropped."""
        idle = [half for half in stepped.halves if not half.effect and not _is_masked(half)]
        moves = any(any(p.changes) for p in stepped.parameters)
        if moves and stepped.halves and not any(half.effect for half in stepped.halves):
            yield self._none(stepped, observation)
        if len(idle) != 1:
            return
        half = idle[0]
        yield self.violation(
            place(observation),
            f"the {half.half} half of the batch ({half.samples} samples) has no influence on the "
            "gradient: replaced by other samples, it leaves every number as it was",
            value=0.0,
            cause="a slice of the batch, a loop over micro-batches of which one is kept, a part "
            "whose backward pass is missing, or a mask over places instead of samples",
            independent=True,
            severity="warn" if half.rows == 1.0 else "fail",
        )

    def _none(self, stepped: Stepped, observation: Observation) -> Finding:
        samples = sum(half.samples for half in stepped.halves)
        return self.violation(
            place(observation),
            f"none of the {samples} samples of the batch has an influence on what the step does: "
            "replaced by one another, they leave every parameter as it was",
            value=0.0,
            cause="the step reads another batch, from around it, or writes over the gradient; a "
            "step that needs no data takes None for a batch",
            independent=True,
        )


def _is_masked(half: HalfInfluence) -> bool:
    """Whether it is the samples that have no gradient, not their places in the batch."""
    return half.rows == 1.0 and half.moved_rows == 1.0
