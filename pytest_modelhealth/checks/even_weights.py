"""Samples or tokens that weigh more on one rank than on another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_modelhealth.checks.between_ranks import BetweenRanks
from pytest_modelhealth.settings import Setting

if TYPE_CHECKING:
    from pytest_modelhealth.report import Observation
    from pytest_modelhealth.report.ranks import Disagreement


class EvenWeights(BetweenRanks):
    """A sample weighs the same on each rank; a little more in a shorter batch."""

    name = "even_weights"
    summary = "A sample or token weighs about the same, whichever rank it is on."
    rank = 54
    role = "loss"
    limit_name = "max_weight_ratio"
    definition = (
        "Where each rank's loss is a mean over its own targets, those that are ignored left out, "
        "the most of them on a rank is at most max_weight_ratio times the fewest."
    )
    source = (
        "the mean over ranks of means over unequal numbers: transformers#34242, torchtitan#2206"
    )
    settings = (
        Setting(
            "max_weight_ratio",
            float,
            default=1.5,
            minimum=1.0,
            help="largest weight of a target relative to one of another rank, where each rank's "
            "loss is a mean over its own (one sample fewer of 32: 1.03)",
        ),
    )

    def cause(self, found: Disagreement, observation: Observation) -> str:
        """Return how to weigh evenly."""
        return (
            "gradients are averaged over ranks, however many targets each has: divide the sum of "
            "the loss by the number of targets of all ranks, and multiply by the number of ranks"
        )
