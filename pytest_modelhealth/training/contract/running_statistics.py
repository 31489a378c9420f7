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
        "its running mean is the same, bit for bit, after all calls."
    )
    source = "exact: a momentum of 0, or statistics that are put back"

    def judge(
        self, stepped: Stepped, observation: Observation, settings: Settings
    ) -> Iterator[Finding]:
        """Yield the normalisations whose statistics stand still."""
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
