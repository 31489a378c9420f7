"""Running statistics follow the batches that a model is trained on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytest_modelhealth.checks import Finding
from pytest_modelhealth.training.contract.step_check import StepCheck, listed, place

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation, Stepped
    from pytest_modelhealth.settings import Settings


class RunningStatistics(StepCheck):
    """Batch normalisations that learn keep statistics that move."""

    name = "running_statistics"
    summary = "Running statistics of a batch normalisation that learns move in training."
    rank = 72
    role = "buffers"
    definition = (
        "A batch normalisation with trainable weights runs in training mode with gradients on, and "
        "its running mean is the same, bit for bit, after all calls. A momentum of more than 0.5 "
        "is warned of, and so are statistics that move although the weights are frozen, or by a "
        "forward without gradients."
    )
    source = "exact: a momentum of 0, or statistics that are put back"

    def judge(
        self, stepped: Stepped, observation: Observation, settings: Settings
    ) -> Iterator[Finding]:
        """Yield the normalisations whose statistics stand still."""
        for which, what, cause in (
            (
                [mode.layer for mode in stepped.modes if mode.drifts],
                "are frozen, and their running statistics move",
                "requires_grad_(False) leaves statistics alone: call eval() on the frozen part too",
            ),
            (
                [mode.layer for mode in stepped.modes if mode.unseen and mode.kind == "batch_norm"],
                "also run without gradients in training mode, which moves their running statistics",
                "a forward for logging, counting or a look ahead: call eval() around it",
            ),
        ):
            if which:
                yield self.violation(
                    place(observation, which[0]),
                    f"the normalisations {listed(which)} {what}",
                    value=float(len(which)),
                    tensor="running_mean",
                    cause=cause,
                    affected=which[1:],
                    severity="warn",
                )
        hasty = [mode.layer for mode in stepped.modes if mode.hasty and mode.trainable]
        if hasty:
            yield self.violation(
                place(observation, hasty[0]),
                f"the running statistics of {listed(hasty)} are made of the latest batch by more "
                "than half",
                value=0.0,
                tensor="running_mean",
                cause="torch's momentum is the share of the new batch, 0.1 as a rule: 0.9 or 0.99 "
                "is how other frameworks write 0.1 or 0.01",
                affected=hasty[1:],
                severity="warn",
            )
        still = [mode.layer for mode in stepped.modes if mode.still and mode.trainable]
        if still:
            yield self.violation(
                place(observation, still[0]),
                f"the running statistics of {listed(still)} do not move in training, so that "
                "evaluation normalises by what they were at the start",
                value=0.0,
                tensor="running_mean",
                cause="momentum=0 (torch's momentum is the share of the new batch: 0.1 is usual), "
                "or buffers that are written back",
                affected=still[1:],
                independent=True,
            )
